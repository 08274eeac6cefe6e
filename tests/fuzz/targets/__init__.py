"""One module per surface. KIND is its corpus; `attempt` does with the file what the commands do,
and raises the same errors."""

from __future__ import annotations

SURFACES = (
    "log_reader",
    "cat",
    "perfetto",
    "chrome",
    "torch",
    "flashinfer",
    "fleet",
    "graphs",
    "tables",
    "reports",
    "diff",
    "compression",
    "comparison",
    "gguf_header",
    "inspection",
    "blocks",
    "model_report",
    "weights",
    "imatrix",
    "debug_protocol",
)
