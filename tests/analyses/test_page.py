"""`instr page`: its figures are those of the commands, its size is bounded, its texts stay text."""

from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.page import MOST_LAYERS, compute_page
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import LEVELS, build_tree
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.report.icicle import MOST, draw_icicle
from llamacpp_instr.report.page import Figure, render_page
from llamacpp_instr.report.plain_charts import BINS, binned
from llamacpp_instr.report.report import Report, shown
from llamacpp_instr.report.tree import Node, Tree
from tests.conftest import Instr, assert_refused
from tests.fuzz.guard import Finding, check_figures
from tests.kit.made_log import encode, make_log
from tests.kit.reports import by_title, session_of

TESTS = Path(__file__).parent.parent
RECORDED = TESTS / "fixtures" / "demo-verbose.log"
HOSTILE = TESTS / "fuzz" / "corpus" / "log" / "seed-hostile.log"
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def session() -> Session:
    return load_session(RECORDED)


@pytest.fixture(scope="module")
def texts(session: Session) -> Texts:
    return Texts(page_of(session))


def page_of(session: Session) -> str:
    return render_page(*compute_page([session]))


class Texts(HTMLParser):
    """The texts of a page, by the element that holds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.within: list[tuple[str, dict[str, str | None]]] = []
        self.found: list[tuple[str, str]] = []
        self.boxes: list[tuple[str, float, float, int]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within.append((tag, dict(attrs)))
        known = dict(attrs)
        if tag == "button" and (known.get("class") or "").startswith("c"):
            left, width, top = re.findall(r"[\d.]+", known.get("style") or "")
            title = (known.get("title") or "").partition(":")[0]
            self.boxes.append((title, float(left), float(width), int(top)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.found.append((self.within[-1][0], data))

    def of(self, tag: str) -> list[str]:
        return [text for of, text in self.found if of == tag]


def test_it_has_every_figure_of_the_summary(session: Session, texts: Texts) -> None:
    cells = set(texts.of("td")) | set(texts.of("span"))
    for section in compute_summary(session):
        for row in section.filled().rows:
            units = [column.unit for column in section.filled().columns]
            for cell, unit in zip(row, units, strict=True):
                words = shown(cell, "fraction" if unit == "share" and cell is not None else unit)
                assert words.strip() in cells or not words, (section.title, words)
        notes = set(texts.of("p"))
        assert set(section.notes) <= notes
    text = "".join(token for token in texts.of("i"))
    assert "".join(session.tokens["text"]).replace("\n", "\u21b5")[:200] in text


def test_what_is_asked_first_is_at_the_top(session: Session) -> None:
    _, sections = compute_page([session])
    titles = [section.title for section in sections]
    summary = [section.title for section in compute_summary(session)]
    first = summary[: summary.index("Speed") + 1]
    assert titles[: len(first) + 1] == ["", *first]
    assert sorted(set(summary) - set(titles)) == []
    order = [
        "Speed over time", "Time by layer and op", "Session, phase, layer, block, op",
        "Memory over time", "KV cache over time", "Tokens with their times",
        "The most expensive weights", "Identity, machine and settings",
    ]  # fmt: skip
    assert [title for title in titles if title in order] == order


def test_the_map_of_many_layers_counts_layers(tmp_path: Path) -> None:
    """What is outside of layers is its last column, even where layers are left out."""
    n = MOST_LAYERS + 3
    events = make_log(Random(2).randint, n_contexts=1, level="detailed", n_layers=n)
    _, sections = compute_page([session_of(tmp_path / "deep.log", events)])
    (heat,) = (section for section in sections if section.title == "Time by layer and op")
    assert isinstance(heat, Figure)
    assert "Not shown: 3 further layers." in heat.notes
    columns = re.findall(r"layer (\d+|none): ", heat.markup)
    assert len(set(columns)) == MOST_LAYERS + 1
    assert "none" in columns


def test_the_picture_of_the_tree_needs_no_script(session: Session, texts: Texts) -> None:
    """Every box is inside its parent's, as wide as its amount."""
    tree, boxes = build_tree(session), texts.boxes
    assert boxes[0] == ("session", 0, 100, 0)
    left = 0.0
    for phase in tree.root.children:
        share = 100 * phase.amount / tree.root.amount
        (found,) = [box for box in boxes if box[0] == phase.name]
        assert found[1:3] == pytest.approx((left, share), abs=1e-3)
        left += share
    for name, begin, width, top in boxes[1:]:
        above = [box for box in boxes if box[3] == top - 30]
        assert any(b - 0.01 <= begin and begin + width <= b + w + 0.01 for _, b, w, _ in above), (
            name
        )


def test_what_came_from_outside_stays_text() -> None:
    page = page_of(load_session(HOSTILE))
    check_figures(page)
    assert "<script>alert" not in page
    assert Texts(page).of("h1")[0].startswith("<script>alert(1)</script>\\x1b[31m")
    # the check would see it
    with pytest.raises(Finding):
        check_figures(page.replace("<h2>Speed</h2>", "<h2>Speed<img src=x></h2>"))
    with pytest.raises(Finding):
        check_figures(page.replace("</body>", "<script>alert(2)</script></body>"))


def test_a_token_stays_text(tmp_path: Path) -> None:
    token = "</i></style></script><script>alert(1)</script>\x00'\"&"
    events = [
        replace(event, text=token) if isinstance(event, s.Token) else event
        for event in make_log(Random(3).randint, 2, "detailed")
    ]
    assert any(isinstance(event, s.Token) for event in events)
    page = page_of(session_of(tmp_path / "hostile.log", events))
    check_figures(page)
    assert token.replace("\x00", "\\x00") in Texts(page).of("i")


def long_log(path: Path, n_steps: int) -> None:
    """A session of that many decodes after the first steps of a made log."""
    events = make_log(Random(8).randint, 1, "minimal")[:-1]
    last = max(event.t for event in events)
    head = [e for e in events if not isinstance(e, s.Mark)]
    step = max(e.step for e in head if isinstance(e, s.StepEnd)) + 1
    compute = max(e.compute for e in head if isinstance(e, s.Compute)) + 1
    graph = next(e.graph for e in reversed(head) if isinstance(e, s.Compute))
    with path.open("wb") as file:
        file.write(encode(head))
        for i in range(n_steps):
            t, dur = last + 10**7 * (i + 1), 10**6 + 997 * (i % 1000)
            own = [
                s.StepBegin(t=t, step=step + i, ctx=0, kind="decode", phase="decode", n_tokens=1,
                            n_outputs=1, n_seqs=1, pos=i),
                s.Compute(t=t, compute=compute + i, graph=graph, ctx=0, step=step + i,
                          source="decode", reused=True, n_tokens=1, n_threads=1, dur=dur),
                s.StepEnd(t=t + dur, step=step + i, status=0, n_ubatch=1, n_reused=1, prepare=0,
                          readback=0),
                s.Token(t=t + dur, ctx=0, step=step + i, index=i + 9, id=1, text=f" word{i}",
                        dur=100),
            ]  # fmt: skip
            if i % 4 == 0:
                own += [
                    s.Kv(t=t + dur, ctx=0, step=step + i, op="apply", used=i % 512, size=512),
                    s.Memory(t=t + dur, ctx=0, rss=i, buffers=[s.BufferUse(buffer="CPU", model=i)]),
                ]
            file.write(encode(own))


def test_a_long_session_has_a_small_page(tmp_path: Path) -> None:
    pages = []
    for n_steps in (3_500, 12_000):
        long_log(tmp_path / "long.log", n_steps)
        pages.append(page_of(load_session(tmp_path / "long.log")))
    sizes = [len(page.encode()) for page in pages]
    assert sizes[1] < MOST_BYTES / 10
    assert sizes[1] < 1.02 * sizes[0], "it does not grow with the session"
    texts = Texts(pages[-1])
    assert " word0" in texts.of("i")
    assert " word11999" in texts.of("i")
    assert " word6000" not in texts.of("i")
    assert any("of 12,00" in note for note in texts.of("p"))


def test_a_large_model_has_a_small_tree() -> None:
    """It has more parts than any model; only the largest are drawn."""
    random = Random(5)

    def op(i: int) -> Node:
        return Node(f"MUL_MAT q4_K ffn_gate_exps_{i}", random.randrange(1, 10**6))

    layers = [
        Node(f"layer {i}", children=[
            Node(f"block {k}", children=[op(n) for n in range(8)]) for k in range(7)
        ])
        for i in range(400)
    ]  # fmt: skip
    tree = Tree(Node("session", children=[Node("decode", children=layers)]), "time", "ns", LEVELS)
    figure = draw_icicle("T", [tree] * 3)
    assert len(figure.markup) < MOST_BYTES / 2
    (data,) = re.findall(r'<script type="application/json">(.*)</script>', figure.markup)
    nodes = json.loads(data)["nodes"]
    assert len(nodes) == MOST
    assert nodes[0] == ["session", -1, 0, *[tree.root.amount] * 3]
    assert all(-1 <= parent < i for i, (_, parent, *_) in enumerate(nodes))
    kept = sorted(amount for _, amount in tree.stacks())[-1]
    assert any(node[3] == kept for node in nodes)


def test_bins_keep_the_extremes_and_the_middle() -> None:
    rng = np.random.default_rng(1)
    x = np.sort(rng.integers(0, 10**9, 50_000))
    y = rng.lognormal(0, 1, 50_000)
    line = binned("a", x, y, (0, 10**9))
    assert len(line.x) == BINS
    assert (line.low.min(), line.high.max()) == (y.min(), y.max())
    at = x * BINS // 10**9 == 17
    assert line.middle[17] == np.median(y[at])
    few = binned("b", x[:BINS], y[:BINS], (0, 10**9))
    assert few.middle.tolist() == y[:BINS].tolist()


def test_the_command(instr: Instr, tmp_path: Path) -> None:
    log = tmp_path / "story.log.gz"
    log.write_bytes(gzip.compress(RECORDED.read_bytes()))
    done = instr("page", log)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'story.html'}\n")
    assert instr("page", log, "-o", "-").stdout == (tmp_path / "story.html").read_text()
    assert_refused(instr("page", log), "story.html exists", "--force")
    assert_refused(instr("page", "-"), "name the page with -o")


def test_several_sessions_follow_a_table_of_their_figures(session: Session, tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    begin = session.start.id.encode()
    other.write_bytes(RECORDED.read_bytes().replace(begin, b"0123456789abcdef", 1))
    sessions = [session, load_session(other)]
    title, (table, *sections) = compute_page(sessions)
    assert title == "2 sessions"
    assert isinstance(table, Report)
    assert [str(row[0]).rpartition(", ")[2] for row in table.rows] == [RECORDED.name, other.name]
    assert table.rows[0][1:] == table.rows[1][1:], "the same session but for its id"
    figures = by_title(compute_summary(session))["Time by the clock"].figures
    assert table.rows[0][1] == figures["tokens/s"][0]
    alone = [section.title for session in sessions for section in compute_page([session])[1]]
    headed = [section.title for section in sections]
    assert [found for found in headed if found not in {row[0] for row in table.rows}] == alone
    assert str(table.rows[1][0]) in render_page(title, [table, *sections])


def test_a_passage_for_each_request(tmp_path: Path) -> None:
    for seed in range(4):
        events = make_log(Random(seed).randint, 3, "minimal")
        session = session_of(tmp_path / f"{seed}.log", events)
        requests = [of for of in find_requests(session)[1] if of.token_times]
        page = page_of(session)
        headings = [text for text in Texts(page).of("h3") if text.startswith("Context ")]
        assert len(headings) == len(requests)
        assert sorted(text.partition(",")[0] for text in headings) == sorted(
            f"Context {request.ctx}" for request in requests
        )
        assert not any("sequence" in text for text in headings), "the only one is not named"
        assert page.count(' data-t="') == sum(len(of.token_times) for of in requests)
