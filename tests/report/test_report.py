"""A report: its cells with their units, as text and as JSON."""

from __future__ import annotations

import pytest

from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import Column, Report, shown


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "ns", "0 ns"),
        (999, "ns", "999 ns"),
        (1000, "ns", "1.00 µs"),
        (999_960, "ns", "1.00 ms"),
        (12_345_678, "ns", "12.3 ms"),
        (3.5e12, "ns", "3,500 s"),
        (1023, "bytes", "1023 B"),
        (1536, "bytes", "1.50 KiB"),
        (5 << 40, "bytes", "5.00 TiB"),
        (0.5, "share", " 50.0 % █████"),
        (0.049, "share", "  4.9 % ▌"),
        (2.5e9, "flop_per_second", "2.50 G"),
        (1234.5, "per_second", "1,234"),
        (1234567, "count", "1,234,567"),
        (-1, "layer", "none"),
        (3, "layer", "3"),
        (None, "ns", ""),
        ("word", "ns", "word"),
    ],
)
def test_cells_are_shown_with_their_units(value, unit, text):
    assert shown(value, unit) == text


def test_a_report_as_text_and_as_json():
    columns = [Column("Name"), Column("time", "ns", "kept")]
    report = Report("A [title]", columns, [["a [b] row", 1500], ["b", 20]], ["Said once."])
    report.figures["Often, B/s"] = (1, "share")
    assert render_text([report]) == (
        "A [title]\n"
        "  Name          time\n"
        "  a [b] row  1.50 µs\n"
        "  b            20 ns\n"
        "  Said once.\n"
    )
    assert report.to_json() == {
        "id": "a_title",
        "title": "A [title]",
        "columns": [
            {"id": "name", "title": "Name", "unit": "text"},
            {"id": "kept", "title": "time", "unit": "ns"},
        ],
        "rows": [{"name": "a [b] row", "kept": 1500}, {"name": "b", "kept": 20}],
        "figures": {"often_b_per_s": {"title": "Often, B/s", "value": 1, "unit": "fraction"}},
        "notes": ["Said once."],
    }


def test_columns_of_one_name_have_two_ids():
    """As the sides of a comparison of a log with itself."""
    report = Report("", [Column("A, types"), Column("A, types")], [["x", "y"]], key="twice")
    assert report.to_json()["rows"] == [{"a_types": "x", "a_types_2": "y"}]
