"""Every architecture that upstream's test can generate is recorded completely, with its layers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.findings import Facts, find_causes
from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.log.session import in_order, load_session
from llamacpp_instr.log.steps import Account, counted_steps
from tests.kit.log_readers import whole_events
from tests.kit.made_probe import probe_of_caches
from tests.kit.native_kit import ROOT, random_models, unpatched_library

pytestmark = pytest.mark.native

# Nodes without a layer: the embedding before the first, the output after the last, and what some
# architectures compute between all of them (streams of hyper-connections, residual mixes).
GLOBAL = re.compile(
    r"(embd|inp_embd|inp_embd_scaled|inp_scaled|inp_norm|embd_norm|inpL|pos_embd"
    r"|model\.input_embed|model\.embed_tokens|embedding_output"
    r"|norm_w|result_norm|result_output|result_output_no_bias|result_embd_pooled"
    r"|lmhead_scaling|h_nextn|hc_init|hc_head(_mixes|_pre)?|hc_gate|res_probs)"
    r"( \(view\) \(cont\))?"
)
UNNAMED = re.compile(r"node_\d+|norm|")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    probe("record", str(folder))
    return folder


def probe(*arguments: str, unpatched: bool = False) -> str:
    env = dict(os.environ)
    if unpatched:
        env["LLAMA_CPP_LIB_PATH"] = str(unpatched_library())
    script = ROOT / "tests" / "kit" / "probe_architectures.py"
    return subprocess.run(
        [sys.executable, str(script), str(random_models()), *arguments],
        env=env, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def test_there_are_about_as_many_as_upstream_knows(logs: Path) -> None:
    assert len(list(logs.glob("*.log"))) == len(list(random_models().glob("*.gguf"))) >= 120


def test_every_log_checks_clean(logs: Path) -> None:
    findings = [str(finding) for log in sorted(logs.glob("*.log")) for finding in check_log(log)]
    assert findings == []


def test_no_finding_fires_where_none_was_provoked(logs: Path) -> None:
    """Except that of a machine that other tests really disturb."""
    fired = set()
    for log in logs.glob("*.log"):
        session = load_session(log)
        probe = probe_of_caches(session.start.host.cpu)
        causes = find_causes(Facts(Account(session, counted_steps(session)[0]), probe))
        fired |= {(log.name, finding.rule) for finding in causes}
    assert {(name, rule) for name, rule in fired if rule != "disturbed-machine"} == set()


def test_the_kernels_in_the_log_are_the_nodes_that_ggml_ran(logs: Path) -> None:
    ran = json.loads(probe("count", unpatched=True))
    logged = {log.stem: count_logged_nodes(log) for log in logs.glob("*.log")}
    assert logged == ran


def test_experts_are_those_that_an_eval_callback_finds(logs: Path) -> None:
    """Their uses, and the bytes of the weights that each product with experts reads."""
    n_models = n_products = 0
    for name, truth in json.loads(probe("experts", unpatched=True)).items():
        logged = list(products_with_experts(logs / f"{name}.log"))
        expected = [
            ({int(expert): n for expert, n in uses.items()}, len(uses) * n_bytes)
            for uses, n_bytes in truth
        ]
        assert logged == expected, name
        n_models += bool(truth)
        n_products += len(truth)
    assert n_models >= 40
    assert n_products >= 1000


def products_with_experts(log: Path) -> Iterator[tuple[dict[int, int], int]]:
    """For each MUL_MAT_ID in order of time: how many tokens used each expert, and the bytes that it
    read, without those of the tokens, the ids and the result."""
    session = load_session(log)
    begins = {n: t + start for n, t, start in session.computes.tuples("compute", "t", "start")}
    uses: dict[tuple[int, int], dict[int, int]] = {}
    for event in whole_events(log):
        if isinstance(event, schema.Experts):
            assert event.t == begins[event.compute]
            for node, expert, n in event.choices():
                uses[event.compute, node] = dict(zip(expert, n, strict=True))
    for ops, row in in_order(session.ops):
        graph = session.graphs[session.plans[ops.plan].graph]
        work = session.work(ops.rows([row])).total([0])
        assert not work.bound[list(session.kernels(ops.plan).choices)].any()
        for kernel, choice in session.kernels(ops.plan).choices.items():
            (node,) = session.kernels(ops.plan).nodes[kernel]
            rest = [tensor(graph, of).bytes for of in (*graph.whole.src[node][1:], node)]
            read = int(work.bytes[kernel]) - sum(rest)
            yield uses[int(ops.compute[row]), choice.node], read


def count_logged_nodes(log: Path) -> int:
    plans: dict[int, int] = {}
    total = 0
    for event in whole_events(log):
        if isinstance(event, schema.Plan):
            plans[event.plan] = sum(event.n or [1] * len(event.node))  # fused ones counted
        elif isinstance(event, schema.Ops):
            total += plans[event.plan]
    return total


def output_side(nodes: schema.Nodes) -> set[int]:
    """Nodes whose results reach no node of a layer."""
    read_by_layer = set()
    for i in reversed(range(len(nodes.name))):
        if nodes.layer[i] >= 0 or i in read_by_layer:
            read_by_layer.update(nodes.src[i])
    return set(range(len(nodes.name))) - read_by_layer


def test_every_kernel_has_a_layer_or_is_a_named_global(logs: Path) -> None:
    homeless = []
    executed = 0
    for log in sorted(logs.glob("*.log")):
        for event in whole_events(log):
            if not isinstance(event, schema.Graph):
                continue
            assert event.nodes is not None
            nodes = event.nodes
            first = next(i for i, layer in enumerate(nodes.layer) if layer >= 0)
            output = output_side(nodes)
            for i, runs in enumerate(nodes.exec):
                executed += runs
                name = nodes.name[i]
                if not runs or nodes.layer[i] >= 0 or GLOBAL.fullmatch(name):
                    continue
                # others are global by position: before all layers, or not read by any
                unnamed = UNNAMED.fullmatch(name.split(" (")[0])
                if not (unnamed and (i < first or i in output)):
                    homeless.append(f"{log.stem}: node {i} {nodes.op[i]} {name!r}")
    assert executed > 10000
    assert homeless == []


def test_a_node_is_in_the_layer_of_its_name_or_in_the_next(logs: Path) -> None:
    """llama.cpp names a node `NAME-LAYER`, and ggml what it makes of it `… (reshaped)`. What the
    next layer makes of the last result of a layer, `l_out-0 (reshaped)`, belongs to that one."""
    elsewhere = []
    in_the_next = named = 0
    for log in sorted(logs.glob("*.log")):
        for event in whole_events(log):
            if not isinstance(event, schema.Graph) or event.nodes is None:
                continue
            for name, layer in zip(event.nodes.name, event.nodes.layer, strict=True):
                found = re.match(r"(?:.*-|cache_[kv]_l)(\d+)( \(.*)?$", name)
                if found:
                    named += 1
                    apart = layer - int(found[1])
                    in_the_next += apart == 1
                    if apart not in ((0, 1) if found[2] else (0,)):
                        elsewhere.append(f"{log.stem}: {name!r} is in layer {layer}")
    assert elsewhere == []
    assert 0 < in_the_next < 0.01 * named
