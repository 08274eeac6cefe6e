"""The units of the columns of tables, for the metadata of files."""

from __future__ import annotations

UNITS: dict[str, dict[str, str]] = {
    "sessions": {"memory": "bytes", "begin": "ns"},
    "steps": {
        **dict.fromkeys(("begin", "end", "dur", "prepare", "readback", "recorder"), "ns"),
        "tokens_per_s": "1/s",
    },
    "requests": dict.fromkeys(("arrival", "begin", "first_token", "end", "queued"), "ns"),
    "layers": dict.fromkeys(("begin", "dur"), "ns"),
    "ops": {
        **dict.fromkeys(("begin", "dur", "wait"), "ns"),
        **{"flops": "FLOP", "bytes": "bytes", "gb_per_s": "GB/s", "gflop_per_s": "GFLOP/s"},
    },
    "nodes": {"bytes": "bytes", "bytes_moved": "bytes", "flops": "FLOP"},
    "tensors": {"bytes": "bytes", "bits_per_weight": "bits"},
    "tokens": dict.fromkeys(("begin", "dur"), "ns"),
    "kv": {"t": "ns", "bytes": "bytes", **dict.fromkeys(("used", "size", "n_kv"), "cells")},
    "memory": {"t": "ns", **dict.fromkeys(("model", "context", "compute", "rss"), "bytes")},
    "marks": dict.fromkeys(("begin", "end", "dur"), "ns"),
    "machine": dict.fromkeys(("begin", "end", "dur", "cpu", "delay", "steal"), "ns"),
    "computes": dict.fromkeys(("t", "apply", "build", "alloc", "inputs", "begin", "dur"), "ns"),
    "messages": {"t": "ns"},
    "notes": {"t": "ns"},
    "tensor_stats": {"t": "ns"},
}
"""of columns, by table; others have none"""
