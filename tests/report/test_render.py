"""Reports as Markdown, CSV, HTML and wide text: exact, and no text of a log becomes markup."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from llamacpp_instr.base.terminal import printable
from llamacpp_instr.report.render import render_csv, render_html, render_markdown, render_text
from llamacpp_instr.report.report import MOST_ROWS, Column, Report

COLUMNS = [Column("Name"), Column("time", "ns"), Column("share", "fraction")]
REPORT = Report("A | <b>", COLUMNS, [["x|y <i>", 1500, 0.25], ["z_1", None, None]], ["A *note*."])


def test_markdown():
    assert render_markdown([REPORT]) == (
        "## A \\| \\<b\\>\n"
        "\n"
        "| Name | time | share |\n"
        "| --- | ---: | ---: |\n"
        "| x\\|y \\<i\\> | 1.50 µs | 25.0 % |\n"
        "| z\\_1 |  |  |\n"
        "\n"
        "A \\*note\\*.\n"
    )


def test_csv_has_the_numbers_as_they_are():
    assert render_csv(REPORT) == "Name,time (ns),share\nx|y <i>,1500,0.25\nz_1,,\n"


def test_html_is_one_page_that_needs_nothing_else():
    page = render_html([REPORT, Report("Empty", COLUMNS, [])])
    assert page.startswith("<!doctype html>")
    assert '<td>x|y &lt;i&gt;</td><td class="number" data-value="1500">1.50 µs</td>' in page
    assert "<h2>Empty</h2>" in page
    assert "http:" not in page
    assert "https:" not in page


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self.tags.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "td":
            self.cells[-1] += data


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp"))))
def test_no_text_becomes_markup(text: str):
    report = Report(text, COLUMNS, [[text, 1, 0.5]], [text])
    parser = _Tags()
    parser.feed(render_html([report]))
    assert parser.tags == [
        "html", "head", "meta", "meta", "meta", "link", "title", "style", "body", "section", "h1",
        "div", "table", "thead", "tr", "th", "th", "th", "tbody", "tr", "td", "td", "td", "p",
        "script",
    ]  # fmt: skip
    (row,) = list(csv.reader(io.StringIO(render_csv(report))))[1:]
    assert row == [printable(text), "1", "0.5"]
    cells = render_markdown([report]).splitlines()[4]
    assert cells.replace("\\|", "").count("|") == 4


def test_columns_without_room_stand_below_beside_the_first():
    columns = [Column("Op"), *(Column(f"p{i}", "ns") for i in range(9))]
    report = Report("Wide", columns, [["MUL_MAT", *[1500] * 9]])
    assert render_text([report], width=60) == (
        "Wide\n"
        "  Op            p0       p1       p2       p3       p4\n"
        "  MUL_MAT  1.50 µs  1.50 µs  1.50 µs  1.50 µs  1.50 µs\n"
        "\n"
        "  Op            p5       p6       p7       p8\n"
        "  MUL_MAT  1.50 µs  1.50 µs  1.50 µs  1.50 µs\n"
    )


def test_a_column_without_cells_is_not_shown():
    report = Report("Bare", [Column("Op"), Column("a", "ns"), Column("b", "ns")], [["x", None, 5]])
    assert render_text([report]) == "Bare\n  Op     b\n  x   5 ns\n"
    assert "| Op | b |" in render_markdown([report])
    assert render_html([report]).count("<th scope") == 2
    assert render_csv(report).startswith("Op,a (ns),b (ns)\n"), "a script finds every column"


def test_pieces_of_a_table_name_their_rows_and_break_no_word():
    """By number where the first columns cannot: here they are equal."""
    names = [Column("host"), Column("build"), Column("phase"), Column("p50_ns", "ns")]
    rows = [["machine-with-an-id-of-39-characters-01", "0.3.36+instr.1", phase, ns]
            for phase, ns in (("decode", 1500), ("prefill", 2500))]  # fmt: skip
    report = Report("Speed", names, rows, labels=2)
    assert render_text([report], width=60) == (
        "Speed\n"
        "  #  host                                    build\n"
        "  1  machine-with-an-id-of-39-characters-01  0.3.36+instr.1\n"
        "  2  machine-with-an-id-of-39-characters-01  0.3.36+instr.1\n"
        "\n"
        "  #  phase        p50\n"
        "  1  decode   1.50 µs\n"
        "  2  prefill  2.50 µs\n"
    )
    assert "#" not in render_text([report], width=100)
    assert render_csv(report).startswith("host,build,phase,p50 (ns)\n")
    assert [of["id"] for of in report.to_json()["columns"]] == ["host", "build", "phase", "p50_ns"]


def test_a_wide_character_takes_two_columns():
    report = Report("Wide", [Column("名"), Column("n", "count")], [["日本", 1], ["abc", 22]])
    assert render_text([report]) == "Wide\n  名     n\n  日本   1\n  abc   22\n"


def test_forms_for_people_show_the_largest_rows_and_count_the_rest():
    columns = [Column("buffer"), Column("weights", "bytes")]
    rows = [[f"b{i}", i * 7919 % 10_007] for i in range(10_007)]
    report = Report("Memory", columns, rows)
    kept = {name for name, size in rows if size >= 10_007 - MOST_ROWS}
    page = render_html([report])
    for text in (render_text([report]), render_markdown([report]), page):
        assert f"Not shown: {10_007 - MOST_ROWS:,} more rows." in text
        found = re.findall(r"\bb\d+\b", text)
        assert (len(found), set(found)) == (MOST_ROWS, kept)
        assert found == sorted(found, key=lambda name: int(name[1:]))
    assert render_csv(report).count("\n") == 1 + 10_007
    assert len(report.to_json()["rows"]) == 10_007


def test_layers_that_look_the_same_are_one_row():
    columns = [Column("Layer", "layer"), Column("time", "ns")]
    rows = [[layer, 5_000 + layer % 3] for layer in (*range(9), 20, 21, 22, 23, -1)]
    rows[4][1], rows[-1][1] = 7_000, 9_000
    text = render_text([Report("Layers", columns, rows)])
    assert text == (
        "Layers\n"
        "            Layer     time\n"
        "  0-3, 5-8, 20-23  5.00 µs\n"
        "                4  7.00 µs\n"
        "             none  9.00 µs\n"
        "  A row is one layer of each kind; --json has all layers.\n"
    )
    assert "Not" not in render_text([Report("Few", columns, rows[:12])])
