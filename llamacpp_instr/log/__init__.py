"""Logs: their bytes, events and ids, a session in columns, and the graphs that it ran."""
