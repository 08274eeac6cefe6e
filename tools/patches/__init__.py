"""Edits the patched tree, exports the patch series from it, and checks the series.

Invariant: an export depends only on the commits. So a series that was exported and applied is
exported again to the same bytes, by every user and on every machine.
"""
