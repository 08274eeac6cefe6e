"""Every command that reads a file, on every input of the fuzzers' corpus and on small files that
hold much, in 1 GB of memory and 20 s a file: done, or refused in one line."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import SURFACES
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.report_names import word

pytestmark = pytest.mark.native
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
SOUND = CORPUS / "log" / "seed-verbose.log"
TYPES = CORPUS / "gguf" / "seed-types.gguf"
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "log_reader": ("log", ["check FILE", "check FILE --json"]),
    "cat": ("log", ["cat FILE -o OUT", "cat FILE --expand -o OUT"]),
    "perfetto": ("log", ["to-perfetto FILE -o OUT --flows", "view FILE OUT"]),
    "chrome": (
        "log",
        ["to-perfetto FILE --format json -o OUT", "to-perfetto FILE --lenient -o OUT"],
    ),
    "torch": ("log", ["to-torch FILE -o OUT"]),
    "otlp": ("log", ["to-otlp FILE -o OUT"]),
    "flashinfer": ("log", ["to-flashinfer FILE -o OUT"]),
    "fleet": ("log", ["collect FILE -o OUT"]),
    "graphs": ("log", ["ops FILE", "to-onnx FILE -o - --no-weights"]),
    "tables": ("log", ["to-parquet FILE -o OUT", "to-parquet FILE --csv -o OUT"]),
    "reports": (
        "log",
        [
            "summary FILE",
            "stats FILE",
            "stats FILE --by tensor --html",
            "page FILE -o OUT",
            "schedule FILE --split rows",
            "schedule FILE --phase prefill --split tiles",
        ],
    ),
    "diff": ("log", ["diff FILE FILE", f"diff {word(SOUND)} FILE --by layer"]),
    "compression": ("log", ["report FILE", "report FILE -o OUT.html"]),
    "comparison": ("log", ["compare FILE FILE", f"compare {word(SOUND)} FILE -o OUT.html"]),
    "gguf_header": ("gguf", ["inspect FILE --json"]),
    "inspection": ("gguf", ["inspect FILE", "inspect FILE --tensors"]),
    "blocks": ("gguf", ["blocks FILE token_embd.weight", "blocks FILE blk.0.f16.weight"]),
    "model_report": ("gguf", ["report FILE", f"compare FILE {word(TYPES)}"]),
    "weights": ("gguf", ["weights FILE", f"quality FILE {word(TYPES)} --only weights"]),
    "imatrix": ("imatrix", [f"quantize {word(DEMO)} --types Q4_K_M --imatrix FILE --dry-run"]),
}
"""what a user types to reach each surface, and the kind of its files"""


def test_every_surface_has_its_commands() -> None:
    """Except the debugger's protocol, which comes through a pipe: its framing has limits."""
    assert set(COMMANDS) == set(SURFACES) - {"debug_protocol"}
