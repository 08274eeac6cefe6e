"""Logs in the forms of other tools: traces, tables, flat events."""
