"""One recorded session in every command: equal things have equal figures."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import llamacpp_instr
from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.report.report import shown
from tests.kit.in_process import titled
from tests.kit.reported import Reported, Row


class PageTables(HTMLParser):
    """The tables of a page: title -> rows of their cells, with numbers as the page sorts by them;
    its large figures; and the ms below each token, by passage."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str | float]]] = {}
        self.passages: list[list[float]] = []
        self._within: list[str] = []
        self._title = ""
        self.feed(text)
        tiles = re.findall(r"<div><b>(.*?)</b><span>(.*?)</span></div>", text)
        self.tiles = {what: value for value, what in tiles}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag not in ("meta", "link", "br"):
            self._within.append(tag)
        if tag in ("h2", "h4"):
            self._title = ""
        elif tag == "tr" and self._within[-2] == "tbody":
            self.tables.setdefault(self._title, []).append([])
        elif tag == "td":
            self.tables[self._title][-1].append(float(known.get("data-value") or "nan"))
        elif known.get("class") == "timed" or (tag == "h3" and self.passages):
            self.passages.append([])
        elif tag == "i" and "data-t" in known:
            self.passages[-1].append(float((known["data-t"] or "").replace(",", "")))

    def handle_endtag(self, _tag: str) -> None:
        self._within.pop()

    def handle_data(self, data: str) -> None:
        if self._within[-1:] in (["h2"], ["h4"]):
            self._title += data
        elif self._within[-1:] == ["td"]:
            cells = self.tables[self._title][-1]
            if isinstance(cells[-1], float) and np.isnan(cells[-1]):
                cells[-1] = data


def cells(rows: Iterable[Iterable[Any]]) -> list[list[Any]]:
    """The cells that are not empty: JSON has null for them, a page leaves a whole column out."""
    return [[cell for cell in row if cell not in (None, "") and cell == cell] for row in rows]


def check_page(page: PageTables, reports: Iterable[dict[str, Any]]) -> None:
    """The page has these tables with the same numbers."""
    for report in reports:
        if report["rows"]:
            reported = cells(row.values() for row in report["rows"])
            assert cells(page.tables[report["title"]]) == reported, report["title"]


pytestmark = pytest.mark.native
RUNS, TOKENS = 4, 12  # the first run is warm-up; 3 times 11 decodes, an odd number, count


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Reported:
    session = Reported(tmp_path_factory.mktemp("session"), environment)
    words = ["run", "demo", "-p", "Once upon a time", "-n", TOKENS, "--repeat", RUNS]
    session.instr(*words, "--level", "detailed", "--log", session.log)
    session.measure_machine()
    return session


@pytest.fixture(scope="module")
def summarized(session: Reported) -> dict[str, Row]:
    return session.reports("summary", session.log)


@pytest.fixture(scope="module")
def summary(summarized: dict[str, Row]) -> dict[str, list[Row]]:
    return {title: report["rows"] for title, report in summarized.items()}


@pytest.fixture(scope="module")
def requests(session: Reported) -> dict[str, Row]:
    return session.reports("requests", session.log)


@pytest.fixture(scope="module")
def flat(session: Reported) -> list[Row]:
    """The lines of `cat --expand`."""
    return [json.loads(line) for line in session.instr("cat", session.log, "--expand").splitlines()]


@pytest.fixture(scope="module")
def counted(flat: list[Row]) -> set[int]:
    """Steps outside of the warm-up, as a user of jq would select them."""
    warm = {line["phase"]: line["t"] for line in flat if line.get("name") == "warm-up"}
    begun = [line for line in flat if line["event"] == "step_begin" and "ctx" in line]
    return {line["step"] for line in begun if not warm["begin"] <= line["t"] < warm["end"]}


def summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for name, amount in pairs:
        sums[name] += amount
    return dict(sums)


def test_the_log_is_as_expected(counted: set[int]) -> None:
    assert len(counted) == (RUNS - 1) * TOKENS


def test_the_time_of_each_op(
    session: Reported, summary: dict[str, list[Row]], flat: list[Row], counted: set[int]
) -> None:
    (stats,) = session.tables("stats", session.log).values()
    spent = {row["op"]: row["total"] for row in stats}
    assert {row["Op"]: row["time"] for row in summary["Top ops"]} == spent
    assert {row["Op"]: row["calls"] for row in summary["Top ops"]} == {
        row["op"]: row["count"] for row in stats
    }
    assert not any("at_most" in row for row in [*stats, *summary["Top ops"]])
    for name in ("FLOP/s", "bytes/s"):
        assert [row[name] for row in summary["Top ops"]] == [row[name] for row in stats]

    ops = load_tables(session.log).ops
    ops = ops[ops.step.isin(counted) & (ops.thread == 0)]
    assert ops.groupby("label", observed=True).dur.sum().to_dict() == spent
    by_label = ops.groupby("label", observed=True)[["bytes", "flops", "dur"]].sum()
    for name, column in (("bytes/s", by_label.bytes), ("FLOP/s", by_label.flops)):
        rates = {row["op"]: row[name] or 0 for row in stats}
        assert (column / by_label.dur * 1e9).to_dict() == pytest.approx(rates)

    def as_in_table(line: Row) -> tuple[int, str, str, int, str]:
        shape = "x".join(map(str, line["ne"]))
        return line["step"], line["name"], line["type"], line["dur"], shape

    in_table = ops[["step", "name", "type", "dur", "shape"]].astype(object)
    rows = [line for line in flat if line["event"] == "op" and line["step"] in counted]
    assert [as_in_table(line) for line in rows] == [tuple(row) for row in in_table.to_numpy()]

    # these have the op alone, without the type of the weight
    named = (("+".join(line.get("fused", [line["op"]])), line["dur"]) for line in rows)
    assert summed(named) == summed((label.partition(" ")[0], ns) for label, ns in spent.items())


def test_the_time_of_blocks_layers_tensors_and_types_is_that_of_the_ops(
    session: Reported, summary: dict[str, list[Row]]
) -> None:
    total = sum(row["time"] for row in summary["Top ops"])
    for by in ("op", "block", "layer", "tensor", "type", "role", "layer,op", "context,block"):
        (rows,) = session.tables("stats", session.log, "--by", by).values()
        assert sum(row["total"] for row in rows) == total, by
    for phase in ("prefill", "decode"):
        (rows,) = session.tables("stats", session.log, "--by", "block", "--phase", phase).values()
        spent = {row["Block"]: row[phase] for row in summary["Where the time went"]}
        assert {row["block"]: row["total"] for row in rows}.items() <= spent.items()


def test_steps_and_tokens_by_second(
    session: Reported, summary: dict[str, list[Row]], counted: set[int]
) -> None:
    (stats,) = session.tables("stats", session.log, "--by", "phase").values()
    steps = load_tables(session.log).steps
    steps = steps[steps.step.isin(counted)]
    for speed, phase in zip(summary["Speed"], stats, strict=True):
        assert speed["Phase"] == phase["phase"]
        of_phase = steps[steps.phase == phase["phase"]]
        assert speed["time"] == phase["total"] == of_phase.dur.sum()
        assert speed["steps"] == phase["count"] == len(of_phase)
        kind = "prompt tokens" if phase["phase"] == "prefill" else "output tokens"
        assert speed[kind] == of_phase.n_tokens.sum()
        assert speed["tokens/s median"] == pytest.approx(of_phase.tokens_per_s.median())
    decode = summary["Speed"][1]
    assert sum(row["decode"] for row in summary["Where the time went"]) == decode["time"]
    assert decode["tokens/s median"] == pytest.approx(1e9 / stats[1]["p50"])


def test_a_layer_from_its_first_kernel_to_its_last(
    session: Reported, summary: dict[str, list[Row]], flat: list[Row], counted: set[int]
) -> None:
    layers = {row["Layer"]: row["prefill"] + row["decode"] for row in summary["Layers"]}
    table = load_tables(session.log).layers
    table = table[table.step.isin(counted)]
    assert table.groupby("layer", observed=True).dur.sum().to_dict() == layers
    lines = [line for line in flat if line["event"] == "step_end" and "layer" in line]
    ends = summed((line["step_name"], line["dur"]) for line in lines if line["step"] in counted)
    assert ends == {f"layer_{layer}": ns for layer, ns in layers.items() if layer >= 0}


def test_against_itself_nothing_differs_and_the_medians_are_those_of_stats(
    session: Reported, counted: set[int]
) -> None:
    found = session.tables("diff", session.log, session.log)
    for title, rows in found.items():
        for row in rows:
            assert row.get("A") == row.get("B"), title
            assert row.get("B / A", 1) == 1, title
    medians = {row["Phase"]: row["A"] for row in found["Steps, median time"]}
    steps = load_tables(session.log).steps
    steps = steps[steps.step.isin(counted)]
    seen = (steps.dur - steps.recorder).groupby(steps.phase.astype(str)).median()
    assert medians == seen.to_dict()
    assert "exclude the time that the recorder itself took" in session.instr(
        "diff", session.log, session.log
    )
    (blocks,) = session.tables("stats", session.log, "--by", "block", "--phase", "decode").values()
    medians = {row["Block"]: row["A"] for row in found["Decode by block, median of a step"]}
    assert medians == {row["block"]: row["p50"] for row in blocks}

    trend = session.tables("diff", session.log, session.log, session.log)
    for row in trend["Steps, median time"]:
        assert row["median step"] == seen[row["Phase"]]
        assert (row["/ first"], row["/ previous"]) in ((None, None), (1, 1))
    of_blocks = trend["Decode by block, median of a step"]
    assert {row["Block"]: row["A"] for row in of_blocks} == medians
    assert {row["Block"]: row["C"] for row in of_blocks} == medians


def test_memory(session: Reported, summary: dict[str, list[Row]]) -> None:
    tables = load_tables(session.log)
    held = {name: sum(row[name] for row in summary["Memory"]) for name in ("weights", "compute")}
    report = titled(json.loads(session.instr("memory", session.log, "--json")))
    (memory,) = [of["rows"] for of in report if of["title"].startswith("Memory of context")]
    measured = summed((row["Memory"].partition(",")[0], row["measured"]) for row in memory)
    assert measured["weights"] == held["weights"] == tables.tensors.bytes.sum()
    assert measured["compute buffers"] == held["compute"] == tables.memory.compute.sum()
    cache = sum(row["KV cache, state"] for row in summary["Memory"])
    assert measured["KV cache"] == cache == tables.memory.context.sum()
    types = session.tables("inspect", "demo")["Types"]
    assert sum(row["bytes"] for row in types) == held["weights"]


def test_requests(
    session: Reported, summarized: dict[str, Row], requests: dict[str, Row], counted: set[int]
) -> None:
    """A run of the log is a request. Its latencies follow from the steps and the tokens."""
    tables = load_tables(session.log)
    steps = tables.steps[tables.steps.step.isin(counted)]
    tokens = tables.tokens[tables.tokens.step.isin(counted)]
    ready = (tokens.begin + tokens.dur).to_numpy().reshape(RUNS - 1, TOKENS)
    begin = steps.begin[steps.phase == "prefill"].to_numpy()
    first, between = ready[:, 0] - begin, np.diff(ready, axis=1)
    latency, *_, every = requests.values()
    latencies = {row["Time"]: row for row in latency["rows"]}
    for name, of in (("to the first token", first), ("between tokens", between)):
        row = latencies[name]
        assert (row["count"], row["longest"]) == (of.size, of.max())
        assert row["p50"] == np.median(of)
        assert row["p90"] == pytest.approx(np.quantile(of, 0.9))
    rows = sorted(every["rows"], key=lambda row: row["Request"])
    assert [row["first token"] for row in rows] == first.tolist()
    assert [row["between"] for row in rows] == np.median(between, axis=1).tolist()
    assert [row["total"] for row in rows] == (ready[:, -1] - begin).tolist()

    clock, speed = summarized["Time by the clock"]["figures"], summarized["Speed"]
    for name in ("to the first token", "between tokens"):
        assert clock[f"{name}, median"]["value"] == latencies[name]["p50"]
    figures = {name: of["value"] for name, of in latency["figures"].items()}
    assert figures["tokens/s by the clock"] == clock["tokens/s"]["value"]
    assert figures["output tokens"] == clock["tokens"]["value"] == ready.size
    assert figures["output tokens"] == speed["figures"]["tokens sampled"]["value"]
    assert figures["prompt tokens computed"] == speed["rows"][0]["prompt tokens"]
    spent = sum(row["its prompt"] + row["its tokens"] for row in rows)
    assert spent == sum(row["time"] for row in speed["rows"])


def test_the_page(session: Reported, summarized: dict[str, Row], requests: dict[str, Row]) -> None:
    page = PageTables(session.instr("page", session.log, "-o", "-"))
    check_page(page, [*summarized.values(), *requests.values()])
    assert "memory-bound" in summarized["Findings"]["figures"], "known by the probe alone"
    (weights,) = session.tables("stats", session.log, "--by", "tensor").values()
    of_weights = [row for row in weights if row["tensor"].endswith(".weight")]
    most = page.tables["The most expensive weights"]
    assert cells(most) == cells(row.values() for row in of_weights[: len(most)])

    clock = summarized["Time by the clock"]["figures"]
    prefill, decode = (row["tokens/s median"] for row in summarized["Speed"]["rows"])
    assert page.tiles == {
        "tokens/s by the clock": shown(clock["tokens/s"]["value"], "per_second"),
        "to the first token": shown(clock["to the first token, median"]["value"], "ns"),
        "between tokens": shown(clock["between tokens, median"]["value"], "ns"),
        "tokens/s, decode, median step": shown(decode, "per_second"),
        "tokens/s, prefill, median step": shown(prefill, "per_second"),
        "resident, most": shown(summarized["Memory"]["figures"]["resident"]["value"], "bytes"),
    }
    # the times below the tokens of a request add up to it, as far as three digits tell
    every = list(requests.values())[-1]
    rows = sorted(every["rows"], key=lambda row: row["Request"])
    for row, (first, *others) in zip(rows, filter(None, page.passages), strict=True):
        assert first == pytest.approx(row["first token"] / 1e6, rel=0.01, abs=0.005)
        assert sum(others) == pytest.approx(
            (row["total"] - row["first token"]) / 1e6, rel=0.01, abs=0.005 * len(others)
        )


def test_the_notebook(
    session: Reported,
    summarized: dict[str, Row],
    requests: dict[str, Row],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", session.environment["LLAMACPP_INSTR_CACHE"])
    log = llamacpp_instr.load(session.log)
    check_page(PageTables(log._repr_html_()), summarized.values())
    tables = load_tables(session.log)
    for name in ("steps", "ops", "layers", "tokens", "requests"):
        pd.testing.assert_frame_equal(getattr(log.tables, name), getattr(tables, name))
    every = list(requests.values())[-1]
    totals = {row["Request"]: row["total"] for row in every["rows"]}
    mine = (log.requests.end - log.requests.begin).tolist()
    assert dict(zip(log.requests.request, mine, strict=True)) == totals
    causes = [(row["Costs"], row["share"]) for row in summarized["Findings"]["rows"]]
    assert list(zip(log.findings.of, log.findings.share, strict=True)) == causes

    axes = Figure().subplots()
    medians = {row["Phase"]: row["tokens/s median"] for row in summarized["Speed"]["rows"]}
    lines = log.plot_speed(axes).get_lines()
    assert {of.get_label(): float(np.median(of.get_ydata())) for of in lines} == medians
    drawn = log.plot_blocks(Figure().subplots()).containers
    for bars in drawn:
        spent = [row[bars.get_label()] or 0 for row in summarized["Where the time went"]["rows"]]
        assert [bar.get_width() * 1e6 for bar in bars] == pytest.approx(spent)
    page = session.log.with_name("notebook.html")
    log.page(page)
    assert page.read_text() == session.instr("page", session.log, "-o", "-")


def test_the_data_set_of_many_logs(
    session: Reported, summary: dict[str, list[Row]], requests: dict[str, Row]
) -> None:
    session.instr("collect", session.log, "-o", "fleet")

    def asked(sql: str) -> list[Row]:
        (rows,) = session.tables("sql", "fleet", sql).values()
        return rows

    of_steps = """select phase, count(*) as n, sum(ns) as ns, sum(tokens) as tokens,
            median(ns) as p50
        from steps where counted group by phase"""
    rows = {row["phase"]: row for row in asked(of_steps)}
    for speed in summary["Speed"]:
        row = rows[speed["Phase"]]
        assert (row["n"], row["ns"]) == (speed["steps"], speed["time"])
        kind = "prompt tokens" if speed["Phase"] == "prefill" else "output tokens"
        assert row["tokens"] == speed[kind]
        if speed["Phase"] == "decode":
            assert speed["tokens/s median"] == pytest.approx(1e9 / row["p50"])

    of_ops = "select op, sum(kernels)::bigint as n, sum(ns)::bigint as ns from ops group by op"
    spent = {row["op"]: (row["n"], row["ns"]) for row in asked(of_ops)}
    assert spent == {row["Op"]: (row["calls"], row["time"]) for row in summary["Top ops"]}
    of_blocks = "select block, phase, sum(ns)::bigint as ns from ops group by all"
    blocks = {(row["block"], row["phase"]): row["ns"] for row in asked(of_blocks)}
    in_summary = {
        (row["Block"], phase): row[phase]
        for row in summary["Where the time went"]
        for phase in ("prefill", "decode")
    }
    assert blocks.items() <= in_summary.items()
    assert sum(blocks.values()) == sum(ns for _, ns in spent.values())

    every = list(requests.values())[-1]
    mine = asked("select first_token_ns, between_tokens_ns, ns from requests order by time")
    listed = sorted(every["rows"], key=lambda row: row["Request"])
    assert [tuple(row.values()) for row in mine] == [
        (row["first token"], row["between"], row["total"]) for row in listed
    ]


def test_the_exports_for_pytorch_and_for_kernel_writers(
    session: Reported, summary: dict[str, list[Row]], counted: set[int]
) -> None:
    spent = {row["Op"]: row["time"] for row in summary["Top ops"]}
    session.instr("to-torch", session.log, "-o", "profile")
    trace = session.log.with_name("profile") / "llama.cpp.pt.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [of for of in events if of["name"].partition("#")[2] in map(str, counted)]
    inside = (
        (of["name"], round(of["dur"] * 1000))
        for of in events
        if of.get("cat") == "kernel"
        and any(step["ts"] <= of["ts"] < step["ts"] + step["dur"] for step in steps)
    )
    assert summed(inside) == spent

    session.instr("to-flashinfer", session.log, "-o", "dataset")
    found = json.loads(session.log.with_name("dataset").joinpath("occurrences.json").read_bytes())
    every = [*found["workloads"], *found["without_definition"]]
    assert sum(of["ns"] for of in every) == sum(spent.values())
