"""`instr validate` on another backend than the CPU: ggml's RPC backend, whose server computes in
another process. Parts of a graph on different backends read copies of each other's values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.programs import native_program
from tests.kit.reported import Row
from tests.kit.rpc_kit import instr_over_rpc, rpc_library, rpc_server

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def rpc() -> Path:
    return rpc_library()


def validated(rpc: Path, address: str, out: Path, layers: int = -1) -> tuple[int, list[Row]]:
    """The exit status, and the tables."""
    words = ("validate", "demo", "-n", 1, "-o", out)
    done = instr_over_rpc(rpc, address, *words, layers=layers)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


@pytest.mark.parametrize("layers", [-1, 2])
def test_every_op_is_checked_where_it_ran(rpc: Path, layers: int, tmp_path: Path) -> None:
    with rpc_server(rpc) as address:
        status, (ops, whole, cache) = validated(rpc, address, tmp_path / "a.json", layers)
    assert status == 0
    assert ops["figures"]["checked"]["value"] == 2 * 82
    checked = {row["device"].partition("[")[0]: 0 for row in ops["rows"]}
    for row in ops["rows"]:
        checked[row["device"].partition("[")[0]] += row["checked"]
        assert row["verdict"] == "ok"
    assert set(checked) == {"CPU", "RPC0"}
    if layers < 0:
        assert checked["CPU"] == 2, "the rows of the embedding"
    else:
        assert min(checked.values()) > 2 * 20, "layers on both"
    assert [row["verdict"] for row in (*whole["rows"], *cache["rows"])] == ["ok", "ok"]


def test_a_broken_kernel_of_a_server_is_found_there(rpc: Path, tmp_path: Path) -> None:
    """The client's kernels are sound."""
    flags = ("-shared", "-fPIC", "-Wl,--as-needed")
    broken = native_program("broken_kernel", tmp_path, flags=flags)
    with rpc_server(rpc, {"LD_PRELOAD": str(broken), "BROKEN_KERNEL": "GLU"}) as address:
        status, (ops, whole, _) = validated(rpc, address, tmp_path / "a.json", layers=2)
    assert status == 1
    faults = {(row["op"], row["device"].partition("[")[0]) for row in ops["rows"]
              if row["verdict"] == "fault"}  # fmt: skip
    assert faults == {("GLU", "RPC0")}
    assert any(row["op"] == "GLU" and row["device"] == "CPU" for row in ops["rows"])
    assert whole["rows"][0]["verdict"] == "fault"
