"""The machine is measured with ggml's own kernels, and ops are compared with what was measured."""

from __future__ import annotations

import ctypes
import json
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.probe import busy_note, roofline
from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.types import TYPES
from llamacpp_instr.prediction.probe import measure
from llamacpp_instr.prediction.probe.file import Bandwidth, Kernel, probe_json, read_probe
from llamacpp_instr.prediction.probe.measure import F32, Graph
from llamacpp_instr.report.report import BOUND
from tests.conftest import Instr
from tests.kit.commands_kit import PAGES, lines_of
from tests.kit.made_log import make_log
from tests.kit.made_probe import MIB, probe_of
from tests.kit.reports import rows as rows_of
from tests.kit.reports import session_of

LOG = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


def test_the_closest_measurement_is_taken() -> None:
    probe = probe_of()
    assert probe.bandwidth_of(2, 3 * MIB).bytes == 64 * MIB
    assert probe.bandwidth_of(2, 65 * MIB).bytes == 64 * MIB
    assert probe.bandwidth_of(2, MIB / 2).bytes_per_second == 15e10
    assert probe.bandwidth_of(1, 64 * MIB).bytes_per_second == 9e10
    assert probe.bandwidth_of(16, 1).threads == 2
    kernels = [probe.kernel_of("f16", tokens, 3) for tokens in (1, 7, 8, 500)]
    assert [of and of.tokens for of in kernels] == [1, 1, 8, 8]
    assert probe.kernel_of("q4_K", 1, 1) is None


def test_a_probe_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_bytes(probe_json(probe_of("a")))
    assert read_probe(tmp_path / "probe.json") == probe_of("a")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"probe": 2}', "\ud800", '{"probe": 1, "bandwidth": []}']
)
def test_another_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UsageError, match="not a file of `instr probe`"):
        read_probe(path)


def test_an_op_reaches_the_lower_roof() -> None:
    session = load_session(LOG)
    reports, _ = roofline(session, probe_of(session.start.host.cpu))
    rows = {
        (report.title.rpartition(" ")[2], row["op"]): row
        for report in reports
        for row in rows_of(report)
    }
    ops = load_tables(LOG).ops
    ops = ops[(ops.thread == 0) & (ops.phase == "decode")]
    of_op = ops[(ops.op == "MUL_MAT") & ops.weight.astype(str).str.contains("ffn_down")]
    row = rows["decode", "MUL_MAT ffn_down"]
    assert row["time"] == of_op.dur.sum()
    assert row["FLOP/s"] == pytest.approx(of_op.flops.sum() / of_op.dur.sum() * 1e9)
    # one token needs 0.99 FLOPs for a byte: 2e10 bytes/s allow less than the kernel's 1e11 FLOP/s
    assert row["FLOP/byte"] == pytest.approx(of_op.flops.sum() / of_op.bytes.sum())
    assert row["attainable"] == pytest.approx(2e10 * row["FLOP/byte"])
    assert row["reached"] == pytest.approx(row["FLOP/s"] / row["attainable"])
    assert row["limit"] == "memory"
    assert rows["decode", "ROPE Qcur"]["reached"] == pytest.approx(
        rows["decode", "ROPE Qcur"]["bytes/s"] / 2e10
    )


def test_every_row_compares_its_sums_with_the_roofs_of_its_threads_tokens_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Computes of two threads read 7 MB; a prefill has 5 tokens, a decode 1."""
    drawn: list[Any] = []
    module = "llamacpp_instr.converters.analyses.probe.roofline_chart"
    monkeypatch.setattr(module, lambda *of: drawn.append(of))
    session = load_session(LOG)
    probe = replace(
        probe_of(session.start.host.cpu),
        bandwidth=[
            Bandwidth(n, size * MIB, rate * n)
            for size, rate in ((4, 4e11), (16, 1e11), (64, 5e10)) for n in (1, 2, 4)
        ],
        kernels=[
            Kernel("F16", tokens, n, rate * n / 2)
            for tokens, rate in ((1, 1e11), (4, 2e11), (8, 3e11)) for n in (1, 2, 4)
        ]
        + [Kernel("F32", 1, 2, 5e11), Kernel("F32", 1, 4, 9e11)],
    )  # fmt: skip
    reports, _ = roofline(session, probe)
    ops = load_tables(LOG).ops
    ops = ops[(ops.thread == 0) & ops.weight.notna()]
    role = ops.weight.astype(str).str.replace(r"^blk\.\d+\.|\.weight$", "", regex=True)
    ops = ops.assign(title=ops.op.astype(str) + " " + role)
    seen = 0
    for report in reports:
        phase, rows = report.title.rpartition(" ")[2], rows_of(report)
        times = [row["time"] for row in rows]
        assert times == sorted(times, reverse=True)
        assert [row["share"] for row in rows] == pytest.approx([t / sum(times) for t in times])
        by_title = {row["op"]: row for row in rows}
        for title, of in ops[ops.phase == phase].groupby("title"):
            row, ns, n_bytes = by_title[title], of.dur.sum(), of.bytes.sum()
            several = str(of["shape"].iloc[0]).endswith("x5")
            product = str(title).startswith("MUL_MAT")
            flop_roof = (2e11 if several else 1e11) if product else 5e11
            assert (row["time"], row["bytes/s"]) == (ns, pytest.approx(n_bytes / ns * 1e9))
            intensity = of.flops.sum() / n_bytes
            if intensity:
                assert row["FLOP/byte"] == pytest.approx(intensity)
                assert row["attainable"] == pytest.approx(min(flop_roof, intensity * 2e11))
                assert row["reached"] == pytest.approx(row["FLOP/s"] / row["attainable"])
            else:
                assert (row["FLOP/byte"], row["attainable"]) == (None, None)
                assert row["reached"] == pytest.approx(row["bytes/s"] / 2e11)
            memory = intensity * 2e11 < flop_roof
            assert row["limit"] == ("memory" if memory else "compute")
            seen += 1
    assert seen > 20
    _, slopes, levels, points = drawn[0]
    assert slopes == {"memory": 1e11, "caches": 8e11}
    assert levels == {"fastest kernel": 5e11, "F16, one token": 1e11, "F32, one token": 5e11}
    slowest = [
        (f"{report.title.rpartition(' ')[2]}: {row['op']}", row["FLOP/byte"], row["FLOP/s"])
        for report in reports
        for row in rows_of(report)[:5]
        if row["FLOP/s"]
    ]
    assert [(point.name, point.x, point.y) for point in points] == slowest


def test_every_row_is_that_of_the_ops() -> None:
    """Against pandas: the roofs are medians over the computes, of which each may have its own."""
    session = load_session(LOG)
    probe = probe_of(session.start.host.cpu)
    # all but a few of the decodes have the smaller bandwidth
    ops = load_tables(LOG).ops
    ops = ops[ops.thread == 0]
    size = ops.groupby("compute").bytes.sum()
    probe = replace(
        probe,
        bandwidth=[Bandwidth(2, int(size.iloc[-2]), 9e10), Bandwidth(2, 64 * MIB, 64e10)],
        kernels=[*probe.kernels, Kernel("F16", 4, 2, 2e11), Kernel("Q8_0", 1, 2, 9e12)],
    )
    reports, (chart,) = roofline(session, probe)
    points = []
    for report in reports:
        phase = report.title.rpartition(" ")[2]
        of_phase = ops[ops.phase == phase]
        rows = rows_of(report)
        assert sum(row["time"] for row in rows) == of_phase.dur.sum()
        times = [row["time"] for row in rows]
        assert all(a >= b for a, b in pairwise(times)), "the slowest first"
        points += [f"{phase}: {row['op']}" for row in rows[:5] if row["FLOP/byte"]]
        for row in rows:
            assert row["share"] == pytest.approx(row["time"] / of_phase.dur.sum())
            if not row["op"].startswith("MUL_MAT ffn_down"):
                continue
            of = of_phase[of_phase.weight.astype(str).str.contains("ffn_down")]
            assert row["bytes/s"] == pytest.approx(of.bytes.sum() / of.dur.sum() * 1e9)
            roofs = [
                probe.bandwidth_of(2, float(size[compute])).bytes_per_second
                for compute in of.compute.unique()
            ]
            intensity = of.flops.sum() / of.bytes.sum()
            tokens = 4 if phase == "prefill" else 1
            (kernel,) = [
                k for k in probe.kernels if (k.type, k.tokens, k.threads) == ("F16", tokens, 2)
            ]
            least = min(kernel.flops_per_second, intensity * float(np.median(roofs)))
            assert row["attainable"] == pytest.approx(least)
            by_memory = least < kernel.flops_per_second
            assert row["limit"] == ("memory" if by_memory else "compute")
            reached = row["FLOP/s"] / least
            assert row["reached"] == pytest.approx(reached)
    assert len({float(np.median(roofs)), max(roofs)}) == 2, "the median is not the largest"
    assert chart.title == "Ops under the roofs"
    assert re.findall(r">((?:prefill|decode): [^<]*)<", chart.svg()) == points


def test_a_role_without_a_type_or_with_an_unknown_mask(tmp_path: Path) -> None:
    """It has the fastest kernel's roof; what a mask hides makes its share an upper bound."""
    events = make_log(Random(3).randint, 1, "verbose")
    for event in events:
        if isinstance(event, s.StepBegin):
            event.seq = event.seq_pos = event.seq_tokens = None
    session = session_of(tmp_path / "session.log", events)
    reports, _ = roofline(session, probe_of(session.start.host.cpu))
    ns = sum(sum(e.dur) for e in events if isinstance(e, s.Ops) and e.thread == 0)
    rows = [row for report in reports for row in rows_of(report)]
    assert sum(row["time"] for row in rows) == ns, "thread 0 alone"
    attention = [row for row in rows if row["op"].startswith("FLASH_ATTN_EXT")]
    assert attention
    for row in attention:
        assert {"FLOP/s", "bytes/s", "reached"} <= set(row["at_most"])
    assert not [row for row in rows if row["op"].startswith("MUL_MAT") and "at_most" in row]
    assert BOUND in reports[-1].notes


def test_the_probe_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="run `instr probe` on that machine"):
        roofline(load_session(LOG), probe_of("another"))


@pytest.mark.native
@pytest.mark.parametrize("name", measure.TYPES_OF_WEIGHTS)
def test_the_kernels_that_are_timed_multiply(name: str) -> None:
    number = {type_.name: number for number, type_ in TYPES.items()}[name]
    with Graph(4 * MIB) as graph:
        product = graph.node(
            "ggml_mul_mat", graph.filled(number, 512, 16), graph.filled(F32, 512, 3)
        )
        graph.compute(2)
        found = np.ctypeslib.as_array(
            (ctypes.c_float * 48).from_address(measure.ggml().ggml_get_data(product))
        ).reshape(3, 16)
        weight = np.random.default_rng(0).standard_normal((16, 512), np.float32)
        tokens = np.random.default_rng(0).standard_normal((3, 512), np.float32)
        error = np.abs(found - tokens @ weight.T).max() / np.abs(found).max()
    assert error < (1e-4 if name == "F32" else 0.1)


@pytest.mark.native
@pytest.mark.parametrize(("disturbed", "kept"), [(3, [1, 2]), (99, [1])])
def test_what_another_process_disturbed_is_measured_again_and_then_left_out(
    monkeypatch: pytest.MonkeyPatch, disturbed: int, kept: list[int]
) -> None:
    """With two threads, `disturbed` of four runs take as long as if a thread had waited for its
    CPU."""
    for name, value in (("SIZES", (1,)), ("TYPES_OF_WEIGHTS", ("F16",)), ("TOKENS", (8,))):
        monkeypatch.setattr(measure, name, value)
    runs: list[int] = []

    def fastest_ns(run: partial[None], _seconds: float) -> float:
        runs.extend(run.args)
        return 60.0 if run.args == (1,) else 40_000.0 if runs.count(2) % 4 < disturbed else 30.0

    monkeypatch.setattr(measure, "fastest_ns", fastest_ns)
    monkeypatch.setattr(measure, "thread_counts", lambda: [1, 2])
    probe = measure.measure(lambda *_: None)
    assert [of.threads for of in probe.kernels] == kept
    assert [of.threads for of in probe.bandwidth] == kept
    assert probe.left_out == 2 * (2 - len(kept))
    # 23 products of 2,048 by 256 by 8 in a graph, 64 copies of 1 MiB, and 500 empty ops, in 60 ns
    assert probe.kernels[0].flops_per_second == pytest.approx(23 * 2 * 2048 * 256 * 8 / 60e-9)
    assert probe.bandwidth[0].bytes_per_second == pytest.approx(64 * MIB / 60e-9)
    assert probe.barriers[0].ns == pytest.approx(60 / 500)
    note = busy_note(replace(probe, load=0.0))
    assert (note or "").startswith("2 figures were left out" if probe.left_out else "")


def test_a_cache_that_seems_slower_than_the_memory_is_left_out() -> None:
    slow, memory, fast = Bandwidth(1, MIB, 4e9), Bandwidth(1, 64 * MIB, 1e10), Bandwidth(2, 1, 4e9)
    entries = [slow, memory, fast, Bandwidth(1, 4 * MIB, 5e9)]
    assert [measure._is_plausible(of, entries) for of in entries] == [False, True, True, True]


@pytest.mark.native
def test_a_machine_is_measured_and_a_log_compared_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instr: Instr
) -> None:
    for name, value in (("SECONDS", 0.0), ("SIZES", (1,)), ("TYPES_OF_WEIGHTS", ("F16",))):
        monkeypatch.setattr(measure, name, value)
    done: list[tuple[int, int]] = []
    probe = measure.measure(lambda *at: done.append(at))
    counts = measure.thread_counts()
    assert done[-1] == (len(counts) * (2 + len(measure.TOKENS)),) * 2
    assert probe.bandwidth[0] == Bandwidth(1, MIB, probe.bandwidth[0].bytes_per_second)
    found = len(probe.bandwidth) + len(probe.kernels) + len(probe.barriers)
    assert found + probe.left_out == done[-1][1]
    (tmp_path / "probe.json").write_bytes(probe_json(probe))

    log = tmp_path / "a.log"
    assert instr("run", "demo", "-p", "Once", "-n", 2, "--log", log).returncode == 0
    page = tmp_path / "roof.html"
    shown = instr("roofline", log, "--machine", tmp_path / "probe.json", "-o", page)
    assert shown.returncode == 0, shown.stderr
    assert "Ops under the roofs</h2>" in page.read_text(encoding="utf-8")
    as_json = instr("roofline", log, "--machine", tmp_path / "probe.json", "--json")
    titles = [report["title"] for report in json.loads(as_json.stdout)]
    assert titles == ["Under the roofs: prefill", "Under the roofs: decode"]


def test_without_a_probe_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="run `instr probe`"):
        read_probe()
    with pytest.raises(UsageError, match=r"missing.json: no such file"):
        read_probe(tmp_path / "missing.json")


RUNS = [line for page in PAGES for line in lines_of(page) if " --device Vulkan0" in line.text]
"""lines of pages that are run here"""


def test_the_pages_have_one_command_for_a_device() -> None:
    assert {line.text for line in RUNS} == {"instr probe --device Vulkan0"}
