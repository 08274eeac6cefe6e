"""Every command that reads a file, on every input of the fuzzers' corpus and on small files that
hold much, in 1 GB of memory and 20 s a file: done, or refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.hostile import write_hostile
from tests.fuzz.targets import SURFACES
from tests.kit.native_kit import DEMO, ROOT

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
    "diff": ("log", ["diff FILE FILE", f"diff {SOUND} FILE --by layer"]),
    "compression": ("log", ["report FILE", "report FILE -o OUT.html"]),
    "comparison": ("log", ["compare FILE FILE", f"compare {SOUND} FILE -o OUT.html"]),
    "gguf_header": ("gguf", ["inspect FILE --json"]),
    "inspection": ("gguf", ["inspect FILE", "inspect FILE --tensors"]),
    "blocks": ("gguf", ["blocks FILE token_embd.weight", "blocks FILE blk.0.f16.weight"]),
    "model_report": ("gguf", ["report FILE", f"compare FILE {TYPES}"]),
    "weights": ("gguf", ["weights FILE", f"quality FILE {TYPES} --only weights"]),
    "imatrix": ("imatrix", [f"quantize {DEMO} --types Q4_K_M --imatrix FILE --dry-run"]),
}
"""what a user types to reach each surface, and the kind of its files"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    write_hostile(directory)
    return directory


def test_every_surface_has_its_commands() -> None:
    """Except the debugger's protocol, which comes through a pipe: its framing has limits."""
    assert set(COMMANDS) == set(SURFACES) - {"debug_protocol"}


@pytest.mark.parametrize("surface", COMMANDS)
def test_no_small_file_takes_much_memory_or_time(
    surface: str, hostile: Path, tmp_path: Path
) -> None:
    kind, commands = COMMANDS[surface]
    files = [*sorted((CORPUS / kind).iterdir()), *sorted((hostile / kind).iterdir())]
    lines = []
    for command in commands:
        for number, file in enumerate(files):
            out = str(tmp_path / f"{len(lines)}-{number}")
            lines.append(
                [word.replace("FILE", str(file)).replace("OUT", out) for word in command.split()]
            )
    results = tmp_path / "results"
    # discarded: what is printed is as long as the file says
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.limited", str(results)],
        input="".join(json.dumps(line) + "\n" for line in lines), text=True, cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    reported = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    wrong = {
        " ".join(line): error
        for line, error in zip(reported[::2], reported[1::2], strict=False)
        if error
    }
    assert wrong == {}
    assert reported[::2] == lines, f"died with {reported[-1]}: {done.stderr[-1000:]}"
    assert done.returncode == 0
