"""One module a surface. KIND is the corpus that it is fed with; `attempt` does with the file what
the commands do, and raises what they would."""

from __future__ import annotations

SURFACES = (
    "log_reader",
    "cat",
    "perfetto",
    "chrome",
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
)
