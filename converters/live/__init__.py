"""Shows a session while it is recorded: reads the log as it grows, keeps the latest figures, and
serves them to a page, a terminal and Prometheus.

Invariant: what is kept does not grow with the length of the session. The recorded program is never
asked for anything: its log is all that is read.
"""
