"""The tables of blocks whose bytes are written by hand: every figure follows from its codes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from llamacpp_instr.converters.analyses import blocks
from llamacpp_instr.converters.analyses.blocks import _columns, _span, histogram_report, number
from llamacpp_instr.converters.analyses.weights import weight_maps
from llamacpp_instr.lab.weights.blocks import CodeRange
from llamacpp_instr.lab.weights.figures import WeightStats
from llamacpp_instr.lab.weights.statistics import BlockStats, CodeCounts, Grid, compute_block_stats
from llamacpp_instr.model.file import load_model_file
from tests.kit import in_process
from tests.kit.block_models import half, rows_of, write_blocks
from tests.kit.reports import Row

SCALES, MINS = [1, 2, 3, 63, 4, 5, 6, 7], [0, 1, 2, 63, 8, 9, 10, 15]
D, DMIN = 0.5, 0.25


def q4_k(d: float = D) -> bytes:
    """A block whose i-th sub-block has the code i + 1 everywhere, except that the first
    begins with 15."""
    packed = [*SCALES[:4], *MINS[:4], *(s | m << 4 for s, m in zip(SCALES[4:], MINS[4:],
                                                                  strict=True))]  # fmt: skip
    pairs = [[(2 * p + 1) | (2 * p + 2) << 4] * 32 for p in range(4)]
    pairs[0][0] = 15 | 2 << 4
    return half(d, DMIN) + bytes(packed) + b"".join(map(bytes, pairs))


def tables(*words: object) -> dict[str, Row]:
    return {of["title"]: of for of in in_process.json_reports("blocks", *words)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    data = rows_of([q4_k(), q4_k(0), q4_k(), q4_k()], 2)
    return write_blocks(tmp_path / "m.gguf", {"t": ("Q4_K", data)})


def table(found: dict[str, Row], title: str) -> list[list[Any]]:
    return [list(row.values()) for row in found[title]["rows"]]


def test_the_scales_of_a_tensor(model: Path) -> None:
    """The median of 32 sub-blocks is the lower of the two in the middle."""
    found = tables(model, "t")
    assert table(found, "Scales") == [
        ["d", 4, 0, 0.5, 0.5, 1, 0, 0], ["dmin", 4, 0.25, 0.25, 0.25, 0, 0, 0],
        ["scales", 32, 1, 4, 63, 0, None, None], ["mins", 32, 0, 8, 63, 4, None, None],
    ]  # fmt: skip
    assert found["Scales"]["notes"][0] == "An element is d x scale x level - dmin x min."
    assert found["t (Q4_K, 512 x 2)"]["notes"] == [
        "576 bytes in 4 blocks of 256 elements.",
        "A block has 8 sub-blocks of 32, each with a scale and a minimum.",
    ]
    figures = {name: of["value"] for name, of in found["t (Q4_K, 512 x 2)"]["figures"].items()}
    assert figures == {"bytes": 576, "blocks": 4, "elements of a block": 256}


def test_the_ends_of_quants_scales_and_minima(model: Path) -> None:
    """Scales that cannot be negative have no least one."""
    found = tables(model, "t")
    assert table(found, "Saturation") == [
        ["quants at the least level, 0", 0, 1024, 0],
        ["quants at the largest level, 15", 4, 1024, 4 / 1024],
        ["scales at the largest, 63", 4, 32, 1 / 8], ["scales of zero", 0, 32, 0],
        ["minima at the largest, 63", 4, 32, 1 / 8], ["minima of zero", 4, 32, 1 / 8],
    ]  # fmt: skip
    (note,) = found["Saturation"]["notes"]
    assert note.startswith("The largest weight of a block sets its scale")


def test_the_histogram_counts_every_code(model: Path) -> None:
    found = tables(model, "t")
    counts = [0, 124, *[128] * 7, *[0] * 6, 4]
    assert table(found, "Quants") == [
        [str(code), str(code), n, n / 1024, n / 128] for code, n in enumerate(counts)
    ]
    assert found["Quants"]["notes"][-1].startswith("With --reference FILE.gguf also its error")


def test_a_block_of_sub_blocks(model: Path, tmp_path: Path) -> None:
    """The reference is 1 everywhere; its second row has a NaN."""
    exact = np.ones((2, 512), np.float32)
    exact[1, 0] = np.nan
    reference = write_blocks(tmp_path / "e.gguf", {"t": ("F32", exact)})
    found = tables(model, "t", "--block", 3, "--reference", reference)
    fields, sub_blocks, elements = found.values()
    assert fields["title"] == "Block 3 of t (Q4_K): row 1, columns 256-511"
    assert [(row["Field"], row["Value"]) for row in fields["rows"]] == [
        ("d", 0.5), ("dmin", 0.25), ("scales", None), ("qs", None),
    ]  # fmt: skip
    values = [[D * SCALES[i] * (i + 1) - DMIN * MINS[i]] * 32 for i in range(8)]
    values[0][0] = D * 15
    for i, row in enumerate(sub_blocks["rows"]):
        assert (row["Sub-block"], row["Scale"], row["Minimum"]) == (i, SCALES[i], MINS[i])
        assert row["Columns"] == f"{256 + 32 * i}-{256 + 32 * i + 31}"
        assert (row["Factor"], row["Added"]) == (D * SCALES[i], -DMIN * MINS[i])
        assert row["Codes"] == ("1 to 15" if i == 0 else str(i + 1))
        rmse = float(np.sqrt(np.mean((np.array(values[i]) - 1) ** 2)))
        assert row["RMSE"] == pytest.approx(rmse)
    assert sub_blocks["notes"] == ["An element is factor x level + what is added."]
    listed, flat = elements["rows"], list(chain(*values))
    assert [row["Value"] for row in listed] == pytest.approx(flat)
    assert [row["Sub-block"] for row in listed] == [i // 32 for i in range(256)]
    assert [row["Error"] for row in listed] == pytest.approx([v - 1 for v in flat])
    assert elements["notes"] == [f"The reference is {reference}."]
    first = tables(model, "t", "--block", 2, "--reference", reference)
    (of_nan, other, *_) = first["Sub-blocks"]["rows"]
    assert of_nan["RMSE"] == pytest.approx(abs(values[0][1] - 1)), "without its first element"
    assert other["RMSE"] == pytest.approx(abs(values[1][0] - 1))
    assert first["Elements"]["rows"][0]["Reference"] == "nan"
    without = tables(model, "t", "--block", 2)
    assert {row["RMSE"] for row in without["Sub-blocks"]["rows"]} == {None}
    assert without["Elements"]["notes"] == []


def test_the_worst_blocks_are_multiples_of_the_tensor_s_error(model: Path, tmp_path: Path) -> None:
    """Compared with itself, except for one element of one block and one NaN."""
    weight = load_model_file(model).by_name["t"]
    exact = np.array([
        [D * SCALES[i % 8] * (15 if k == i == 0 else i % 8 + 1) - DMIN * MINS[i % 8]
         for i in range(8) for k in range(32)]
    ] * 4, np.float32)  # fmt: skip
    exact[1] = [-DMIN * MINS[i] for i in range(8) for _ in range(32)]
    exact[0, 1] = np.nan
    exact[3, 5] += 2
    reference = write_blocks(tmp_path / "e.gguf", {"t": ("F32", exact.reshape(2, 512))})
    found = tables(model, "t", "--reference", reference)["Worst blocks"]
    assert weight.n_elements == 1024
    (row,) = found["rows"]
    whole = (4 / 1023) ** 0.5
    assert (row["Block"], row["Matrix"], row["Row"], row["Columns"]) == (3, None, 1, "256-511")
    assert (row["RMSE"], row["Largest error"]) == (pytest.approx((4 / 256) ** 0.5), 2)
    assert row["Times the tensor's"] == pytest.approx((4 / 256) ** 0.5 / whole)
    assert found["figures"]["RMSE of the tensor"]["value"] == pytest.approx(whole)
    assert found["notes"][0].startswith(f"RMSE of the tensor: {whole:.5g}, against ")
    assert found["notes"][1] == "1 elements that are NaN or infinite were excluded."
    assert found["notes"][2] == "See one of them with --block."


def test_equal_tensors_have_no_worst_block(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q8_0", rows_of([half(1) + bytes(32)], 1))})
    exact = write_blocks(tmp_path / "e.gguf", {"t": ("F32", np.zeros((1, 32), np.float32))})
    worst = tables(path, "t", "--reference", exact)["Worst blocks"]
    assert worst["rows"] == []
    assert worst["notes"][1:] == ["Every value equals the reference's."]


@pytest.mark.parametrize(
    ("type_", "block", "formula", "sub_blocks"),
    [
        ("Q8_0", half(0.5) + bytes(32), "An element is d x level.", None),
        ("Q4_1", half(0.5, 2.0) + bytes(16), "An element is d x level + m.", None),
        ("Q6_K", bytes(192) + bytes([3] * 16) + half(0.5), "An element is d x scale x level.",
         "A block has 16 sub-blocks of 16, each with a scale."),
    ],
)  # fmt: skip
def test_the_formula_of_a_type(
    type_: str, block: bytes, formula: str, sub_blocks: str | None, tmp_path: Path
) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"t": (type_, rows_of([block], 1))})
    fields, scales, *_ = in_process.json_reports("blocks", path, "t")
    assert scales["notes"] == [formula]
    assert fields["notes"][1:] == ([sub_blocks] if sub_blocks else [])
    names = [row["Field"] for row in scales["rows"]]
    assert names == ["d"] + ["m"] * (type_ == "Q4_1") + ["scales"] * (type_ == "Q6_K")
    title = in_process.json_reports("blocks", path, "t", "--block", 0)[1]["title"]
    assert title == ("Sub-blocks" if sub_blocks else "Scale")


def test_scales_that_are_stored_with_an_offset_are_explained(tmp_path: Path) -> None:
    """Q3_K stores 32 for a scale of 0, and 8-bit scales are signed."""
    q3_k = bytes(32 + 64 + 12) + half(1)
    q6_k = bytes(192) + bytes([256 - 3] * 16) + half(1)
    path = write_blocks(tmp_path / "m.gguf", {"a": ("Q3_K", rows_of([q3_k], 1)),
                                              "b": ("Q6_K", rows_of([q6_k], 1))})  # fmt: skip
    notes = [in_process.json_reports("blocks", path, of, "--block", 0)[1]["notes"] for of in "ab"]
    assert notes[0] == ["An element is factor x level.",
                        "Scales are shown as stored: 32 means 0."]  # fmt: skip
    assert notes[1] == ["An element is factor x level."]
    saturation = tables(path, "b")["Saturation"]["rows"]
    assert [row["What"] for row in saturation[2:]] == [
        "scales at the least, -128", "scales at the largest, 127", "scales of zero"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("most", "spans", "counts"),
    [
        (None, ["-2", "-1", "0", "1", "2"], [1, 2, 3, 4, 0]),
        (5, ["-2", "-1", "0", "1", "2"], [1, 2, 3, 4, 0]),
        (4, ["-2 to -1", "0 to 1", "2"], [3, 7, 0]),
        (2, ["-2 to 0", "1 to 2"], [6, 4]),
        (1, ["-2 to 2"], [10]),
    ],
)
def test_neighbouring_codes_are_combined(
    most: int | None, spans: list[str], counts: list[int]
) -> None:
    codes = CodeRange(-2, 2, (-4.0, -2.0, 0.0, 2.0, 4.0), (-4.0, 4.0))
    stats: Any = type("Stats", (), {"quants": CodeCounts(codes, np.array([1, 2, 3, 4, 0]))})
    report = histogram_report(stats, most)
    assert [row[0] for row in report.rows] == spans
    assert [row[2] for row in report.rows] == counts
    assert [row[3] for row in report.rows] == [n / 10 for n in counts]
    assert [row[4] for row in report.rows] == [n / max(counts) for n in counts]
    assert report.rows[0][1] == _span(-4.0, 2.0 * float(spans[0].split(" to ")[-1]))
    together = -(-5 // most) if most else 1
    assert (f"A row has {together} consecutive codes" in report.notes[-1]) == (together > 1)


def test_spans_and_numbers_in_words() -> None:
    assert (_span(3, 3), _span(-1, 2.5), _columns(32, 32)) == ("3", "-1 to 2.5", "32-63")
    assert (number(1.5), number(np.inf), number(np.nan)) == (1.5, "inf", "nan")


# --- pictures ---


def axes_of(stats: BlockStats) -> Any:
    figure = Figure()
    blocks._draw(figure, stats, "viridis")
    return figure


def test_a_picture_names_its_axes_and_units(model: Path, tmp_path: Path) -> None:
    """A row of the tensor is a row of the picture, a block is one unit wide."""
    figure = axes_of(compute_block_stats(load_model_file(model).by_name["t"]))
    axes, bar = figure.axes
    assert axes.get_title() == "t\nQ4_K, 512 x 2: scale by row and block"
    assert axes.get_xlabel() == "block (256 elements in 8 sub-blocks)"
    assert axes.get_ylabel() == "row"
    assert bar.get_ylabel() == "|d x scale| of a sub-block (units of the weights)"
    assert axes.images[0].get_extent() == [-0.5, 1.5, 1.5, -0.5]
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, 1.5), (1.5, -0.5))
    data = rows_of([half(1) + bytes(32)] * 6, 1).reshape(3, 2, -1)
    experts = write_blocks(tmp_path / "x.gguf", {"t": ("Q8_0", data)})
    axes, bar = axes_of(compute_block_stats(load_model_file(experts).by_name["t"])).axes
    assert axes.get_xlabel() == "block (32 elements)"
    assert axes.get_ylabel() == "row (2 of each matrix)"
    assert bar.get_ylabel() == "|d| of a block (units of the weights)"


@pytest.mark.parametrize(
    ("rows", "subs", "n_sub", "bad", "note"),
    [
        (1, 1, 8, False, ""), (2, 1, 1, False, "each cell is the mean of 2 x 1 (rows x blocks)"),
        (1, 3, 8, False, "each cell is the mean of 1 x 3 (rows x sub-blocks)"),
        (1, 1, 8, True, "red: not finite"),
        (2, 3, 8, True, "each cell is the mean of 2 x 3 (rows x sub-blocks); red: not finite"),
    ],
)  # fmt: skip
def test_a_picture_has_notes(rows: int, subs: int, n_sub: int, bad: bool, note: str) -> None:
    cells = np.array([[1.0, np.nan if bad else 2.0]])
    assert blocks._notes(Grid(cells, rows, subs, 1, 2), "mean", n_sub) == note


# --- maps of weights ---


def test_maps_have_a_cell_for_each_layer_and_role(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamacpp_instr.converters.analyses import weights

    def stats(layer: int, role: str, largest: float) -> WeightStats:
        weight: Any = type("Weight", (), {"layer": layer, "role": role})
        moments: Any = type("Moments", (), {"rms": 10.0 * largest, "std": 2.0})
        of: Any = type("Stats", (), {"weight": weight, "moments": moments, "largest": largest,
                                     "rows": None, "columns": None})  # fmt: skip
        found: WeightStats = of
        return found

    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(weights, "map_by_layer", lambda *of: drawn.append(of))
    every = [stats(-1, "output", 9), stats(2, "up", 4), stats(0, "up", 6), stats(0, "down", 8)]
    weight_maps(every)
    (rms, largest, outliers) = drawn
    assert rms[2:] == (["0", "2"], [[60, 80], [40, None]], ["up", "down"])
    assert largest[3] == [[3, 4], [2, None]]
    assert outliers[3] == [[None, None], [None, None]]
    assert weight_maps([stats(-1, "output", 9)]) == []
    monkeypatch.setattr(weights, "MOST_LAYERS", 1)
    drawn.clear()
    weight_maps(every)
    assert drawn[0][2] == ["0"]
