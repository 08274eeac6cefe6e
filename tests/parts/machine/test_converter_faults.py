"""A full disk is one line, and leaves no file of a converter."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.kit.programs import in_namespace
from tests.kit.report_names import word
from tests.kit.rpc_logs import Server, made_logs

pytestmark = pytest.mark.native
TESTS = Path(__file__).parents[2]
LOG = TESTS / "fixtures" / "demo-verbose.log"
MODEL = TESTS / "fuzz" / "corpus" / "gguf" / "seed-types.gguf"
TENSOR = "blk.1.q4_k.weight"
COMMANDS = {
    "trace": f"to-perfetto {word(LOG)} -o output",
    "trace, gzip": f"to-perfetto {word(LOG)} --gzip -o output",
    "trace, JSON": f"to-perfetto {word(LOG)} --format json -o output",
    "trace, JSON, gzip": f"to-perfetto {word(LOG)} --format json --gzip -o output",
    "parquet": f"to-parquet {word(LOG)} -o output",
    "spans": f"to-otlp {word(LOG)} -o output",
    "csv": f"to-parquet {word(LOG)} --csv -o output",
    "cat": f"cat {word(LOG)} --expand -o output",
    "stats": f"stats {word(LOG)} --html -o output",
    "diff": f"diff {word(LOG)} {word(LOG)} -o output",
    "memory": f"memory {word(LOG)} -o output.html",
    "compare": f"compare {word(LOG)} {word(LOG)} -o output.html",
    "inspect": f"inspect {word(MODEL)} --json -o output",
    "blocks": f"blocks {word(MODEL)} {TENSOR} --html -o output",
    "weights": f"weights {word(MODEL)} *q4_k* --html -o output",
    "weights, npz": "weights demo -o output.npz",
    "weights, safetensors": "weights demo -o output.safetensors",
    "quality": f"quality {word(MODEL)} {word(MODEL)} --only weights --html -o output",
    "merge": "merge RPC_LOGS -o output",
}


def words_of(name: str, folder: Path) -> list[str]:
    """A command's words; logs that no fixture has are written to the folder."""
    command = COMMANDS[name]
    if "RPC_LOGS" in command:
        logs = made_logs(1, [Server("10.0.0.2", 0)]).write(folder)
        command = command.replace("RPC_LOGS", " ".join(map(word, logs)))
    return shlex.split(command)


def test_a_full_disk_is_one_line_and_no_file(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    requests = [
        {"args": words_of(name, tmp_path), "cwd": str(disk), "out": str(kept / name)}
        for name in COMMANDS
    ]
    (tmp_path / "requests").write_text("".join(json.dumps(r) + "\n" for r in requests))
    done = in_namespace(
        'mount -t tmpfs -o size=64k none "$1"; dd if=/dev/zero of="$1/filler" 2>/dev/null || true;'
        '"$3" -m tests.kit.nursery <"$2"; ls -A "$1"',
        str(disk), str(tmp_path / "requests"), sys.executable,
    )  # fmt: skip
    *answers, left = done.stdout.splitlines()
    assert left == "filler", done.stdout
    statuses = [json.loads(answer)["status"] for answer in answers[1::2]]
    assert statuses == [1] * len(COMMANDS)
    for name, command in COMMANDS.items():
        printed = (kept / name).read_text()
        output = command.rpartition("-o ")[2].split()[0]
        assert printed.count("\n") == 1, name
        assert printed.startswith(f"Error: {output} cannot be written: "), name
        assert printed.endswith("No space left on device\n"), name
