"""Logs: from bytes to checked events, to a session in columns."""
