"""`instr inspect` of an importance matrix: coverage, and outlier channels by the rule it states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.conftest import Instr
from tests.kit.gguf_files import save
from tests.kit.quantize_kit import legacy_imatrix

EXPERTS = "blk.1.ffn_up_exps.weight"


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    """Two attention tensors, and one of four experts; the last two saw nothing."""
    path = tmp_path / "imatrix.gguf"
    writer = gguf.GGUFWriter(path, "")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["first.txt", "second.txt"])
    writer.add_uint32("imatrix.chunk_count", 20)
    writer.add_uint32("imatrix.chunk_size", 512)
    quiet, loud = np.full(8, 10.0, np.float32), np.full(8, 10.0, np.float32)
    quiet[0], loud[5] = 10 * 100, 10 * 101  # at the bound, and beyond it
    experts = np.full((4, 8), 30.0, np.float32)
    experts[1, 2] = 30 * 500
    for name, sums, counts in (
        ("blk.0.attn_q.weight", quiet[None], [10]),
        ("blk.1.attn_q.weight", loud[None], [10]),
        (EXPERTS, experts, [7, 3, 0, 0]),
    ):
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", np.array(counts, np.float32)[:, None])
    save(writer)
    return path


def inspected(instr: Instr, path: Path) -> dict[str, Any]:
    done = instr("inspect", path, "--json")
    assert done.returncode == 0, done.stderr
    return {report["id"]: report for report in json.loads(done.stdout)}


def test_the_text_and_the_coverage(instr: Instr, matrix: Path) -> None:
    text = instr("inspect", matrix).stdout
    assert "first.txt" in text
    assert "second.txt" in text
    assert "of 512 tokens" in text
    by_id = inspected(instr, matrix)
    assert "2 experts" in " ".join(by_id["importance_matrix"]["notes"])
    assert by_id["coverage_by_role"]["rows"] == [
        {"role": "attn_q", "tensors": 2, "experts": None, "never_reached": 0, "least_inputs": 10},
        {"role": "ffn_up_exps", "tensors": 1, "experts": 4, "never_reached": 2, "least_inputs": 0},
    ]
    [row] = by_id["never_reached"]["rows"]
    assert row == {"tensor": EXPERTS, "experts": 2, "of": 4, "numbers": "2, 3"}


def test_an_outlier_is_above_a_hundred_medians(instr: Instr, matrix: Path) -> None:
    by_id = inspected(instr, matrix)
    experts, attention = by_id["outlier_channels"]["rows"]
    assert (experts["tensor"], experts["expert"], experts["channel"]) == (EXPERTS, 1, 2)
    assert (experts["mean_square"], experts["times_the_median"]) == (5000, 500)
    assert (attention["tensor"], attention["channel"]) == ("blk.1.attn_q.weight", 5)
    assert attention["times_the_median"] == pytest.approx(101)
    tensors = {row["tensor"]: row for row in by_id["tensors"]["rows"]}
    assert [tensors[name]["outliers"] for name in sorted(tensors)] == [0, 1, 1]
    assert tensors[EXPERTS]["largest"] == 5000


def test_the_older_format_has_no_counts(instr: Instr, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(legacy_imatrix({"blk.0.attn_q.weight": np.arange(8, dtype=np.float32)}))
    done = instr("inspect", path, "--tensors")
    assert done.returncode == 0, done.stderr
    assert "words.txt" in done.stdout
    assert "The older format does not say which experts were reached." in done.stdout
    assert "No channel is an outlier." in done.stdout
    path.write_bytes(b"something else")
    done = instr("inspect", path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "not an importance matrix" in done.stderr


@pytest.mark.parametrize("form", ["--md", "--csv", "--html"])
def test_it_comes_in_every_form(instr: Instr, matrix: Path, form: str) -> None:
    done = instr("inspect", matrix, form)
    assert done.returncode == 0, done.stderr
    assert "blk.1.attn" in done.stdout
