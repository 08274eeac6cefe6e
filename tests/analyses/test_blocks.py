"""`instr blocks`, as a user runs it: output, pictures and errors."""

from __future__ import annotations

import csv
import sys
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import gguf
import matplotlib.image
import numpy as np
import pytest

from llamacpp_instr.lab.weights.blocks import LAYOUTS
from tests.conftest import Instr, assert_refused
from tests.kit import in_process
from tests.kit.block_models import half, random_rows, rows_of, write_blocks
from tests.kit.gguf_files import split_model
from tests.kit.quantized_kit import quantized_demo
from tests.kit.reports import Row

NAME = "blk.0.ffn_down.weight"


def blocks(*args: object) -> str:
    return in_process.printed("blocks", *args)


def refusal(*args: object) -> str:
    return in_process.refusal("blocks", *args)


def tables(*args: object) -> list[Row]:
    return in_process.json_reports("blocks", *args)


@pytest.fixture(scope="module")
def q4_k() -> Path:
    return quantized_demo("Q4_K_M")


@pytest.mark.native
def test_a_tensor_as_a_user_has_it(instr: Instr, q4_k: Path) -> None:
    done = instr("blocks", q4_k, NAME, "--reference", "demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in (
        "blk.0.ffn_down.weight (Q4_K, 768 x 256)",
        "110,592 bytes in 768 blocks of 256 elements.",
        "A block has 8 sub-blocks of 32, each with a scale and a minimum.",
        "An element is d x scale x level - dmin x min.",
        "quants at the largest level, 15",
        "Worst blocks",
        "against demo.",
    ):
        assert words in done.stdout


@pytest.mark.native
@pytest.mark.parametrize(
    "file_type", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0"]
)
def test_every_table_fits_a_terminal_and_counts_all(file_type: str) -> None:
    path = quantized_demo(file_type)
    for args in ((), ("--block", "7")):
        text = blocks(path, NAME, "--reference", "demo", *args)
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text, "nothing was cut off"
    fields, _, _, quants, worst = tables(path, NAME, "--reference", "demo")
    *parts, whole = fields["rows"]
    assert sum(row["Bits per weight"] for row in parts) == whole["Bits per weight"]
    assert sum(row["Bytes"] for row in parts) == whole["Bytes"]
    assert sum(row["Count"] for row in quants["rows"]) == 768 * 256
    assert sum(row["Share"] for row in quants["rows"]) == pytest.approx(1)
    errors = [row["RMSE"] for row in worst["rows"]]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 10


@pytest.mark.native
def test_bits_by_field_of_q4_k(q4_k: Path) -> None:
    bits = {row["Field"]: row["Bits per weight"] for row in tables(q4_k, NAME)[0]["rows"]}
    assert bits == {"d": 0.0625, "dmin": 0.0625, "scales": 0.375, "qs": 4, "block": 4.5}


@pytest.mark.native
def test_a_histogram_of_many_codes_is_short_for_readers_only() -> None:
    path = quantized_demo("Q8_0")
    text = blocks(path, NAME)
    assert "A row has 4 consecutive codes; --json and --csv have each code." in text
    rows = list(csv.DictReader(blocks(path, NAME, "--csv").splitlines()))
    assert [int(row["Code"]) for row in rows] == list(range(-128, 128))
    assert len(tables(path, NAME)[3]["rows"]) == 256
    assert sum(int(row["Count"]) for row in rows[:4]) == int(
        next(line for line in text.splitlines() if "-128 to -125" in line)
        .split()[6].replace(",", "")
    )  # fmt: skip


def test_one_block_by_hand(tmp_path: Path) -> None:
    first = half(0.5) + bytes([0xF0]) + bytes([0x88] * 15)
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q4_0", rows_of([bytes(18), first] * 2, 2))})
    exact = np.zeros((2, 64), np.float32)
    exact[1, 32], exact[1, 48] = -3.0, 3.5
    reference = write_blocks(tmp_path / "exact.gguf", {"t": ("F32", exact)})
    fields, scale, elements = tables(path, "t", "--block", 3, "--reference", reference)
    assert fields["title"] == "Block 3 of t (Q4_0): row 1, columns 32-63"
    assert [(row["Field"], row["Value"], row["Hex"]) for row in fields["rows"]] == [
        ("d", 0.5, "00 38"), ("qs", None, "f0" + " 88" * 15),
    ]  # fmt: skip
    (row,) = scale["rows"]
    assert (row["Factor"], row["Codes"], row["RMSE"]) == (0.5, "0 to 15", (1 / 32) ** 0.5)
    begin = int(fields["notes"][0].split("byte ")[1].split(" ")[0].replace(",", ""))
    assert path.read_bytes()[begin : begin + 18] == first
    for i, code, level, value, theirs in ((0, 0, -8, -4.0, -3.0), (16, 15, 7, 3.5, 3.5)):
        row = elements["rows"][i]
        assert (row["Element"], row["Column"], row["Code"]) == (i, 32 + i, code)
        assert (row["Level"], row["Value"], row["Reference"]) == (level, value, theirs)
        assert row["Error"] == value - theirs
    (line,) = (line for line in blocks(path, "t", "--block", 3, "--csv").splitlines()[1:2])
    assert line == "0,,32,0,-8.0,-4.0,,"
    (bits,) = (of for of in tables(path, "t") if "Bits per weight" in of["units"])
    assert [(row["Bytes"], row["Bits per weight"], row["Share"]) for row in bits["rows"]] == [
        (2, 0.5, 2 / 18), (16, 4.0, 16 / 18), (18, 4.5, 1.0)
    ]  # fmt: skip
    (saturation,) = (of for of in tables(path, "t") if of["title"] == "Saturation")
    assert [list(row.values()) for row in saturation["rows"]] == [
        ["quants at the least level, -8", 66, 128, 66 / 128],
        ["quants at the largest level, 7", 2, 128, 2 / 128],
    ]


@pytest.mark.native
def test_a_tensor_against_itself_says_so(q4_k: Path) -> None:
    worst = tables(q4_k, NAME, "--reference", q4_k)[4]
    assert worst["rows"] == []
    assert "Every value equals the reference's." in worst["notes"]


@pytest.mark.native
def test_a_part_of_a_split_model_is_opened(q4_k: Path, tmp_path: Path) -> None:
    first, *_ = split_model(q4_k, tmp_path / "split", tensors=5)
    assert NAME not in gguf_names(first)
    assert blocks(first, NAME, "--reference", "demo") == blocks(q4_k, NAME, "--reference", "demo")


def gguf_names(path: Path) -> list[str]:
    return [tensor.name for tensor in gguf.GGUFReader(path).tensors]


def test_experts_have_a_matrix_and_a_row_in_it(tmp_path: Path) -> None:
    data = random_rows("Q8_0", 6, 2).reshape(3, 2, -1)
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q8_0", data)})
    exact = write_blocks(tmp_path / "e.gguf", {"t": ("F32", np.zeros((3, 2, 64), np.float32))})
    assert blocks(path, "t", "--block", 11).startswith(
        "Block 11 of t (Q8_0): matrix 2, row 1, columns 32-63\n"
    )
    worst = tables(path, "t", "--reference", exact)[4]["rows"]
    assert len(worst) == 10
    for row in worst:
        block = (row["Matrix"] * 2 + row["Row"]) * 2 + (row["Columns"] == "32-63")
        assert row["Block"] == block


def test_random_bytes_of_every_type_are_shown_and_are_json(tmp_path: Path) -> None:
    names = [name for name in LAYOUTS if name != "Q2_0"]  # gguf-py cannot write it yet
    path = write_blocks(tmp_path / "m.gguf", {n: (n, random_rows(n, 64, 1)) for n in names})
    exact = {}
    for name in names:
        text = blocks(path, name)
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        one = tables(path, name, "--block", 63)
        exact[name] = ("F32", np.zeros((64, len(one[2]["rows"])), np.float32))
    reference = write_blocks(tmp_path / "exact.gguf", exact)
    for name in names:
        assert len(tables(path, name, "--reference", reference)[4]["rows"]) == 10


@pytest.mark.native
@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_same_tensor_is_the_same_picture(q4_k: Path, tmp_path: Path, form: str) -> None:
    pictures = [tmp_path / f"{name}.{form}" for name in "abc"]
    for picture in pictures[:2]:
        blocks(q4_k, NAME, "--heat-map", picture)
    blocks(q4_k, NAME, "--heat-map", pictures[2], "--reference", "demo", "--block", 1)
    first, second, errors = (picture.read_bytes() for picture in pictures)
    assert first == second
    assert first != errors
    if form == "png":
        assert matplotlib.image.imread(pictures[0]).shape == (720, 960, 4)
    else:
        assert "RMSE by row and block" in svg_text(pictures[2])


def svg_text(path: Path) -> str:
    return "\n".join(
        "".join(node.itertext()) for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<script>&amp; $\\frac{1", "<script>&amp; $\\frac{1"),
        ("[bold]x[/bold] $x_1$ \\alpha", "[bold]x[/bold] $x_1$ \\alpha"),
        ("\u6f22 red \x1b[31m\x07\n\u202e", "\u6f22 red \\x1b[31m\\x07\\n\\u202e"),
    ],
)
def test_a_name_is_only_a_name(tmp_path: Path, name: str, shown: str) -> None:
    path = write_blocks(tmp_path / "m.gguf", {name: ("Q8_0", random_rows("Q8_0", 4, 2))})
    text = blocks(path, name, "--heat-map", tmp_path / "p.svg")
    assert text.startswith(f"{shown} (Q8_0, 64 x 4)\n")
    assert shown in svg_text(tmp_path / "p.svg")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert all(c.isprintable() or c == "\n" for c in refusal(path, name + "x"))


@pytest.mark.parametrize(
    ("name", "title"),
    [("w" * 60, "w" * 60), ("w" * 61, "w" * 59 + "…"), ("w" * 63, "w" * 59 + "…")],
)
def test_a_long_name_is_cut_in_the_picture(tmp_path: Path, name: str, title: str) -> None:
    path = write_blocks(tmp_path / "m.gguf", {name: ("Q8_0", random_rows("Q8_0", 4, 2))})
    blocks(path, name, "--heat-map", tmp_path / "p.svg")
    assert f"{title}\nQ8_0, 64 x 4: scale by row and block" in svg_text(tmp_path / "p.svg")


def test_what_is_not_finite_is_red_in_the_picture(tmp_path: Path) -> None:
    data = rows_of([half(d) + bytes(16) for d in (1.0, np.nan, 2.0, 3.0)], 2)
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q4_0", data)})
    blocks(path, "t", "--heat-map", tmp_path / "p.png")
    pixels = matplotlib.image.imread(tmp_path / "p.png")
    red = (pixels[:, :, :3] == [1, 0, 0]).all(axis=2)
    # the upper right quarter of the drawing
    ys, xs = np.nonzero(red)
    assert red.sum() > 10_000
    assert xs.min() > 300
    assert ys.max() < 400


def test_a_tensor_without_one_finite_scale_has_a_picture(tmp_path: Path) -> None:
    data = rows_of([half(np.nan) + bytes(16)] * 4, 2)
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q4_0", data)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = blocks(path, "t", "--heat-map", tmp_path / "p.svg")
    assert "nan" in text
    assert "red: not finite" in svg_text(tmp_path / "p.svg")


def test_a_picture_says_what_it_joined(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q4_K", random_rows("Q4_K", 1500, 1))})
    blocks(path, "t", "--heat-map", tmp_path / "p.svg")
    assert "each cell is the mean of 3 x 1 (rows x sub-blocks)" in svg_text(tmp_path / "p.svg")


@pytest.mark.native
def test_without_matplotlib_it_is_one_line(
    q4_k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refusal(q4_k, NAME, "--heat-map", tmp_path / "p.png")
    assert 'pip install "llamacpp-instr[report]"' in line
    assert list(tmp_path.iterdir()) == []
    assert "Quants" in blocks(q4_k, NAME)


@pytest.mark.native
def test_wrong_input_is_one_line(instr: Instr, q4_k: Path, models: Path, tmp_path: Path) -> None:
    assert_refused(instr("blocks", q4_k, "blk.0.fn_down.weight"), "no tensor", "did you mean", NAME)
    assert "(it has 39 tensors)" in refusal(q4_k, "zzzzzzzz")
    assert "did you mean 'blk.0.ffn_down.weight'" in refusal(q4_k, "ffn_down")
    assert "blocks are numbered 0 to 767" in refusal(q4_k, NAME, "--block", 768)
    assert "-1 is not in the range" in refusal(q4_k, NAME, "--block", -1)
    line = refusal("demo", NAME)
    assert "is F16, which has no blocks (quantize it first)" in line
    assert all(name in line for name in LAYOUTS)
    assert "(try 'output.weight')" in refusal(q4_k, "output_norm.weight")
    assert "no tensor" in refusal(q4_k, NAME, "--reference", models / "t5.gguf")
    assert "does not exist" in refusal(q4_k, NAME, "--reference", "nowhere.gguf")
    assert "does not exist" in refusal("nowhere.gguf", NAME)
    other = write_blocks(tmp_path / "o.gguf", {NAME: ("F32", np.zeros((2, 768), np.float32))})
    assert "is 768 x 2, not 768 x 256" in refusal(q4_k, NAME, "--reference", other)
    assert ".png or .svg" in refusal(q4_k, NAME, "--heat-map", "picture.jpg")
    assert "no directory" in refusal(q4_k, NAME, "--heat-map", "nowhere/p.png")
    both = tmp_path / "both.svg"
    assert "cannot contain both" in refusal(q4_k, NAME, "--heat-map", both, "-o", both, "--md")
    assert sorted(tmp_path.iterdir()) == [other]


def test_a_type_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    closed = write_blocks(tmp_path / "i.gguf", {"t": ("IQ2_XXS", random_rows("IQ2_XXS", 2, 1))})
    line = refusal(closed, "t")
    assert "is IQ2_XXS, whose blocks cannot be opened" in line
    assert "types that can be opened: Q4_0, Q4_1" in line
    opened = write_blocks(tmp_path / "q.gguf", {"t": ("Q4_K", random_rows("Q4_K", 2, 1))})
    assert "IQ2_XXS, which cannot be read as reference" in refusal(
        opened, "t", "--reference", closed
    )
