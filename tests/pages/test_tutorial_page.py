"""What docs/tutorials/one-word.md says holds for its recording and for one made now."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.converters.exports.tables import load_tables
from tests.conftest import Instr
from tests.kit.notebook import ROOT, TUTORIAL

PAGE = TUTORIAL.read_text(encoding="utf-8")


def kernels(heading: str) -> list[list[str]]:
    """Op and name of every line of the table below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = section.split("```text\n")[1].split("\n```")[0]
    return [line.split()[:2] for line in table.splitlines()[1:]]


@pytest.mark.native
def test_a_recording_made_now_has_the_same_kernels(instr: Instr, tmp_path: Path) -> None:
    done = instr(
        "run", "demo", "-p", "Once upon a time", "-n", "4", "--level", "verbose", "--threads", "2"
    )
    assert done.returncode == 0, done.stderr
    ops = load_tables(tmp_path / "session.log").ops
    ops = ops[(ops.step == 1) & (ops.thread == 0)]
    for heading, layer in (("2. A token becomes 256 numbers", -1), ("3. Attention: look back", 0)):
        these = ops[ops.layer == layer]
        got = [[op, *name.split()[:1]] for op, name in zip(these.op, these.name, strict=True)]
        assert got == kernels(heading), heading


def test_what_the_text_says_of_the_model_and_the_session() -> None:
    tables = load_tables(ROOT / "tests" / "fixtures" / "demo-verbose.log")
    weights = {t.name: t for t in tables.tensors.itertuples()}
    assert weights["output.weight"].shape == "256x1024"
    layers = {t.layer for t in weights.values() if t.layer >= 0}
    assert len(layers) == 4
    feed_forward = sum(t.n_elements for n, t in weights.items() if "ffn_" in n)
    assert 2 * feed_forward > sum(t.n_elements for t in weights.values())
    # one cell: a key and a value of 128 numbers of 2 bytes in each layer
    kv = tables.kv
    assert set(kv.bytes / kv.used) == {2 * 128 * 2 * len(layers)} == {2048}
    decode = tables.ops[(tables.ops.phase == "decode") & (tables.ops.thread == 0)]
    assert decode[decode.op == "MUL_MAT"].dur.sum() > 0.5 * decode.dur.sum()
    per_layer = decode.groupby(["step", "layer"]).size().groupby("layer").unique()
    assert [list(per_layer[layer]) for layer in range(4)] == [[17], [17], [17], [19]]
