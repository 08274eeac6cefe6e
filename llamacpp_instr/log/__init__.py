"""Logs: bytes, events, ids that are followed, a session in columns, the graphs that it ran."""
