"""`instr validate` finds nothing in sound models, and names the op that is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llamacpp_instr.cli import main
from llamacpp_instr.converters.validate.follow import Checked, Checker
from llamacpp_instr.converters.validate.run import Validation, judge
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import write
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.model.file import load_model_file
from tests.kit.debugger_kit import opened, prompt_of, run
from tests.kit.native_kit import DEMO, random_model
from tests.kit.programs import native_program
from tests.kit.quantized_kit import quantized_demo

pytestmark = pytest.mark.native


class Broken:
    """Changes the value of a node, as a kernel with a fault would."""

    def __init__(self, op: str, name: str, factor: float) -> None:
        self._op, self._name, self._factor = op, name, factor

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> list[int]:
        of = self._op, self._name
        return [node.index for node in graph.nodes if (node.op, node.name) == of]

    def passed(self, stop: Stop) -> None:
        write(stop.node.address, stop.values() * np.float32(self._factor))


def check(model: Path, log: Path, *broken: Broken) -> list[Checked]:
    file = load_model_file(model)
    reader = WeightReader(file)
    found: list[Checked] = []
    checker = Checker(
        lambda name: np.concatenate(list(reader.pieces(file.by_name[name]))), found.append
    )
    with opened(model) as loaded:
        run(loaded, log, followers=[*broken, checker], prompt=prompt_of(loaded, 9), decodes=1)
    return found


@pytest.mark.parametrize(
    ("name", "op"),
    [("ffn_out-2", "MUL_MAT"), ("attn_norm-1", "MUL"), ("Kcur-3", "ROPE"), ("l_out-0", "ADD")],
)
def test_the_op_that_is_wrong_is_named_and_no_other(name: str, op: str, tmp_path: Path) -> None:
    found = check(DEMO, tmp_path / "a.log", Broken(op, name, 1.05))
    verdict = judge(Validation(found, []))
    assert not verdict.passed
    (fault,) = [row for row in verdict.reports[0].rows if row[-1] == "fault"]
    assert (fault[0], fault[5]) == (op, name)


@pytest.fixture(scope="module")
def broken_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("-shared", "-fPIC", "-Wl,--as-needed")
    return native_program("broken_kernel", tmp_path_factory.mktemp("broken"), flags=flags)


@pytest.mark.parametrize("op", ["ROPE", "GLU", "FLASH_ATTN_EXT", "RMS_NORM"])
def test_a_kernel_that_is_broken_is_named_and_no_other(
    op: str, broken_kernel: Path, tmp_path: Path
) -> None:
    out = tmp_path / "checked.json"
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "validate", "demo", "-n", "0", "-o", out],
        env={**os.environ, "LD_PRELOAD": str(broken_kernel), "BROKEN_KERNEL": op},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (ops, *_) = json.loads(out.read_text())
    assert {row["op"] for row in ops["rows"] if row["verdict"] == "fault"} == {op}


def test_rotation_back_is_by_the_negative_angle(tmp_path: Path) -> None:
    found = check(random_model("deepseek4-moe"), tmp_path / "a.log")
    errors = [op.error for op in found if op.op == "ROPE_BACK"]
    assert errors
    assert all(error is not None and error < 1e-7 for error in errors)


def test_the_command_says_what_was_checked(tmp_path: Path) -> None:
    out = tmp_path / "checked.json"
    done = CliRunner().invoke(main, ["validate", "demo", "-n", "1", "-o", str(out)])
    assert done.exit_code == 0, done.output
    ops, whole, cache = json.loads(out.read_text())
    assert ops["figures"]["faults"] == {"title": "faults", "value": 0, "unit": "count"}
    assert ops["figures"]["checked"]["value"] == 2 * 82
    assert [row["verdict"] for row in whole["rows"]] == ["ok"]
    # how much of the tolerance of 2e-3 rounding takes depends on the processor
    assert 0 < whole["figures"]["error"]["value"] < 1e-4
    assert [row["verdict"] for row in cache["rows"]] == ["ok"]


def test_onnx_runtime_collects_no_usage_data(environment: dict[str, str], tmp_path: Path) -> None:
    """It would keep them in a database in the user's cache, and send them after ten seconds."""
    command = [sys.executable, "-m", "llamacpp_instr", "validate", "demo", "-n", "1"]
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(command, env=environment | home, cwd=tmp_path, capture_output=True, check=True)
    assert list(tmp_path.rglob("*onnx*")) == []


def test_a_graph_with_an_op_without_a_mapping_has_no_logits(tmp_path: Path) -> None:
    whole = whole_of(random_model("kimi-k3-moe"), tmp_path)
    assert whole["rows"][0]["verdict"] == "not checked"
    assert whole["notes"] == [
        "The graph was not computed: no standard operators express DSV4_HC_PRE."
    ]


def test_weights_that_do_not_fit_on_the_disk_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _of: SimpleNamespace(free=1000))
    (note,) = whole_of(DEMO, tmp_path)["notes"]
    assert "GB of disk" in note
    assert "set TMPDIR" in note


def test_quantized_weights_part_logits_by_rounding(tmp_path: Path) -> None:
    whole = whole_of(quantized_demo("Q4_K_M"), tmp_path)
    assert [row["verdict"] for row in whole["rows"]] == ["rounding"]
    assert whole["figures"]["error"]["value"] < 1e-2


def whole_of(model: Path, folder: Path) -> dict[str, Any]:
    """The report of the logits of the whole graph."""
    out = folder / "checked.json"
    done = CliRunner().invoke(main, ["validate", str(model), "-n", "0", "-o", str(out)])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(out.read_text())[1]
    return found
