"""A session while it is recorded, for a page, a terminal and Prometheus.

Invariant: what is kept does not grow with the length of the session. The recorded program is never
asked for anything: only its log is read.
"""
