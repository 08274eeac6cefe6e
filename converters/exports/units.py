"""The units of the columns of tables, for the metadata of files."""

from __future__ import annotations

_NS = (
    "t", "begin", "end", "dur", "prepare", "readback", "recorder", "arrival", "first_token",
    "queued", "wait", "delay", "steal", "apply", "alloc", "inputs",
)  # fmt: skip
_ANYWHERE = dict.fromkeys(_NS, "ns") | {
    "bytes": "bytes", "bytes_moved": "bytes", "rss": "bytes", "flops": "FLOP",
    "gb_per_s": "GB/s", "gflop_per_s": "GFLOP/s", "tokens_per_s": "1/s",
    "bits_per_weight": "bits", "used": "cells", "size": "cells", "n_kv": "cells",
}  # fmt: skip
_OF_TABLE = {
    ("machine", "cpu"): "ns", ("computes", "build"): "ns", ("sessions", "memory"): "bytes",
    **dict.fromkeys((("memory", of) for of in ("model", "context", "compute")), "bytes"),
}  # fmt: skip


def unit_of(table: str, column: str) -> str | None:
    """None for a name, a word and a count."""
    return _OF_TABLE.get((table, column), _ANYWHERE.get(column))
