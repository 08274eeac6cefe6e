"""Splits and waits of an RPC device lie within what the caller's clock measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import read_events
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import run_python
from tests.kit.rpc_kit import rpc_library, rpc_server
from tests.recording.test_times import in_order

pytestmark = pytest.mark.native
OVER_RPC = """
import json, sys, time
import llama_cpp.llama_cpp as api
from tests.programs import rpc_client
rpc_client.add_server(*sys.argv[2:4])
rpc_client.place(2)
from tests.kit.decoder import Decoder
import llamacpp_instr

spans = []
decoder = Decoder(sys.argv[1])
with llamacpp_instr.record(sys.argv[4], level="detailed"):
    for tokens in ([1, 2, 3], [4], [5]):
        begin = time.monotonic_ns()
        decoder.decode({0: tokens})
        decoded = time.monotonic_ns()
        api.llama_synchronize(decoder.ctx)
        spans.append([begin, decoded, time.monotonic_ns()])
    decoder.sample()
print(json.dumps(spans))
"""


@pytest.fixture(scope="module")
def over_rpc(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A log with the last layers on another device, and the times of each decode and wait."""
    folder = tmp_path_factory.mktemp("rpc")
    rpc = rpc_library()
    with rpc_server(rpc) as address:
        arguments = (DEMO, rpc, address, folder / "a.log")
        done = run_python(OVER_RPC, *arguments, cwd=ROOT, check=True)
    assert list(check_log(folder / "a.log")) == []
    return folder / "a.log", json.loads(done.stdout)


def test_splits_are_the_backends_of_their_nodes(over_rpc: tuple[Path, list[list[int]]]) -> None:
    log, _ = over_rpc
    graphs = {graph["graph"]: graph for graph in read_events(log, "graph")}
    computes = {compute["compute"]: compute for compute in read_events(log, "compute")}
    assert [name.partition("[")[0] for name in backends(log)] == ["RPC0", "CPU"]
    for graph in graphs.values():
        splits, nodes = graph["splits"], graph["nodes"]
        assert len(splits) > 1
        assert [split["start"] for split in splits[1:]] == [split["end"] for split in splits[:-1]]
        assert (splits[0]["start"], splits[-1]["end"]) == (0, graph["n_nodes"])
        for split in splits:
            places = {
                graph["buffers"][nodes["buffer"][node]].partition("[")[0].partition("_")[0]
                for node in range(split["start"], split["end"]) if nodes["exec"][node]
            }  # fmt: skip
            assert places == {split["backend"].partition("[")[0]}
    assert len(read_events(log, "splits")) == len(computes) == 3
    for splits in read_events(log, "splits"):
        compute = computes[splits["compute"]]
        of_graph = graphs[compute["graph"]]["splits"]
        assert splits["split"] == list(range(len(of_graph)))
        assert splits["asynchronous"] == [int(s["backend"] != "CPU") for s in of_graph]
        start = compute["t"] + compute["start"]
        end = splits["t"] + sum(splits["dur"]) + sum(splits["gap"])
        assert in_order(start, splits["t"], end, start + compute["dur"])


def backends(log: Path) -> list[str]:
    (context,) = read_events(log, "context")
    names: list[str] = context["backends"]
    return names


def test_kernels_of_a_split_are_nodes_of_the_whole_graph(
    over_rpc: tuple[Path, list[list[int]]],
) -> None:
    """Each split is a graph of its own to ggml, whose nodes count from 0."""
    log, _ = over_rpc
    graphs = {graph["graph"]: graph for graph in read_events(log, "graph")}
    for plan in read_events(log, "plan"):
        graph = graphs[plan["graph"]]
        own = [split for split in graph["splits"] if split["backend"] == "CPU"]
        here = [node for split in own for node in range(split["start"], split["end"])]
        count = plan.get("n", [1] * len(plan["node"]))
        first = zip(plan["node"], count, strict=True)
        ran = [node for at, n in first for node in range(at, at + n)]
        runs = graph["nodes"]["exec"]
        assert [node for node in ran if runs[node]] == [node for node in here if runs[node]]


def test_a_wait_for_a_device_lies_inside_of_the_callers(
    over_rpc: tuple[Path, list[list[int]]],
) -> None:
    log, spans = over_rpc
    waits = read_events(log, "sync")
    assert {wait["ctx"] for wait in waits} == {0}
    for _, decoded, waited in spans:
        asked = [wait for wait in waits if decoded <= wait["t"] <= waited]
        assert len(asked) == 1
        assert asked[0]["t"] + asked[0]["dur"] <= waited
    (token,) = read_events(log, "token")
    before = [w["t"] + w["dur"] for w in waits if spans[-1][2] <= w["t"] <= token["t"]]
    assert before, "the sampler waits before its own time begins"
    inside = [w for w in waits if any(begin <= w["t"] <= end for begin, end, _ in spans)]
    assert all(wait["dur"] > 0 for wait in inside)
