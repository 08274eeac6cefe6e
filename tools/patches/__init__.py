"""Edits the patched tree, writes the series back from it, and tells what is wrong with the series.

Invariant: what is written back depends on the commits alone, so a series that was exported and
applied is exported again to the same bytes, whoever does it and wherever.
"""
