"""The tables of `quality` and `quantize`, with figures that are written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.quality import (
    compute_quality,
    draw_divergence,
    list_tensors,
    quantization_reports,
    short_names,
)
from llamacpp_instr.converters.analyses.weights import draw_errors, layer_names, layers_of
from llamacpp_instr.lab.quality import logits
from llamacpp_instr.lab.quality.divergence import SHARES, Divergence, Estimate, Outputs
from llamacpp_instr.lab.quality.logits import OutputOptions, check_comparison
from llamacpp_instr.lab.quantize.plan import QuantizationPlan, TensorPlan
from llamacpp_instr.lab.weights.figures import Sums, WeightError
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.model.types import BY_NAME
from tests.kit.block_models import random_rows, write_blocks
from tests.kit.gguf_files import save

NAMES = ("reference.gguf", "small.gguf", "tiny.gguf")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[ModelFile]:
    """Files of 4 rows of 256, with 8.5, 4.5 and 34 / 8 bits per weight."""
    folder = tmp_path_factory.mktemp("files")
    for name, type_name in zip(NAMES, ("Q8_0", "Q4_K", "Q4_0"), strict=True):
        write_blocks(folder / name, {"t": (type_name, random_rows(type_name, 4, 256 // BY_NAME[
            type_name].block))})  # fmt: skip
    return [load_model_file(folder / name) for name in NAMES]


def divergence(start: float) -> Divergence:
    """Figures that differ from each other, and from those of another start."""
    numbers = iter(start + i / 64 for i in range(99))

    def estimate() -> Estimate:
        return Estimate(next(numbers), next(numbers))

    return Divergence(
        perplexity=estimate(), ratio=estimate(), difference=estimate(),
        correlation=next(numbers), kl=estimate(),
        kl_percentiles=tuple(next(numbers) for _ in SHARES), delta_p=estimate(),
        delta_p_percentiles=tuple(next(numbers) for _ in SHARES), delta_p_rms=estimate(),
        same_top=estimate(),
    )  # fmt: skip


def outputs_of(n_scored: int = 100, seed: int | None = 7) -> Outputs:
    two = [divergence(1), divergence(3)]
    return Outputs(Estimate(20.0, 0.5), two, n_scored=n_scored, n_chunks=1, ctx=512, seed=seed)


def test_a_row_for_each_model(files: list[ModelFile]) -> None:
    outputs = outputs_of()
    sums = [Sums(4, 100.0, 1.0, 1.0), Sums(4, 1000.0, 1.0, 1.0)]
    first, *_ = compute_quality(outputs, files, None, sums)
    assert [column.name for column in first.columns] == [
        "model", "size", "bits/weight", "SQNR", "perplexity", "± ppl", "ppl ratio", "mean KL",
        "± KL", "99.9 % KL", "same top", "RMS Δp",
    ]  # fmt: skip
    reference, *others = first.rows
    size = [file.path.stat().st_size for file in files]
    assert reference == [NAMES[0], size[0], 8.5, None, 20.0, 0.5, *[None] * 6]
    for i, (row, its, bits, db) in enumerate(
        zip(others, outputs.divergences, (4.5, 4.5), (20.0, 30.0), strict=True), 1
    ):
        assert row == [
            NAMES[i], size[i], bits, pytest.approx(db), its.perplexity.value, its.perplexity.error,
            its.ratio.value, its.kl.value, its.kl.error, its.kl_percentiles[-2],
            its.same_top.value, its.delta_p_rms.value,
        ]  # fmt: skip
    assert SHARES[-2] == 0.999
    assert [figure[0] for figure in first.figures.values()] == [1, 512, 100, 7]
    text = "Text: written by reference.gguf itself (temperature 1, seed 7); 1 chunk of 512 tokens."
    assert first.notes[0].startswith(f"{text} The 100 tokens in the second halves")
    assert first.notes[2:] == ["SQNR covers all weights."]
    without, *_ = compute_quality(outputs_of(99), files, "a.txt")
    assert [row[3] for row in without.rows] == [None] * 3
    assert without.notes[0].startswith("Text: a.txt; 1 chunk of 512 tokens. The 99 tokens in")
    assert [note.partition(";")[0] for note in without.notes[2:]] == [
        "Fewer than 100 tokens give unreliable figures"
    ]
    assert without.figures["seed"][0] is None


def test_a_table_for_each_candidate(files: list[ModelFile]) -> None:
    outputs = outputs_of()
    _, ratios, *tables = compute_quality(outputs, files, None)
    assert ratios.title == "Perplexity against reference.gguf"
    assert ratios.rows == [
        [name, its.ratio.value, its.ratio.error, its.difference.value, its.difference.error,
         its.correlation]
        for name, its in zip(NAMES[1:], outputs.divergences, strict=True)
    ]  # fmt: skip
    for table, name, its in zip(tables, NAMES[1:], outputs.divergences, strict=True):
        assert table.title == f"{name} against reference.gguf, by token"
        mean, error, rms, rms_error, *shares = table.rows
        assert mean == ["mean", its.kl.value, its.delta_p.value]
        assert error == ["± mean", its.kl.error, its.delta_p.error]
        assert rms == ["RMS", None, its.delta_p_rms.value]
        assert rms_error == ["± RMS", None, its.delta_p_rms.error]
        # the largest first
        expected = zip(its.kl_percentiles[::-1], its.delta_p_percentiles[::-1], strict=True)
        assert [tuple(row[1:]) for row in shares] == list(expected)
        assert [row[0] for row in shares] == [
            "largest", "99.9 %", "99 %", "95 %", "90 %", "75 %", "median", "25 %", "10 %", "5 %",
            "1 %", "0.1 %", "smallest",
        ]  # fmt: skip
        same = f"{100 * its.same_top.value:.3f} ± {100 * its.same_top.error:.3f} %."
        assert table.notes == [f"Same top token: {same}"]
        assert [figure[0] for figure in table.figures.values()] == [
            its.same_top.value, its.same_top.error
        ]  # fmt: skip


def test_a_correlation_that_is_not_defined_is_empty(files: list[ModelFile]) -> None:
    outputs = outputs_of()
    outputs.divergences[1] = replace(outputs.divergences[1], correlation=math.nan)
    assert [row[-1] is None for row in compute_quality(outputs, files, None)[1].rows] == [
        False, True
    ]  # fmt: skip


def test_files_of_one_name_are_named_by_their_paths(files: list[ModelFile], tmp_path: Path) -> None:
    other = tmp_path / NAMES[0]
    other.write_bytes(files[0].path.read_bytes())
    both = [files[0], load_model_file(other)]
    assert short_names(both) == [str(files[0].path), str(other)]
    assert short_names([files[0], files[0]]) == [NAMES[0]] * 2
    assert short_names(files) == list(NAMES)


def drawn_by(chart: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = FigureCanvasAgg(Figure()).figure
    chart.draw(figure)
    (axes,) = figure.axes
    return axes


def test_the_charts_have_a_point_for_each_model(files: list[ModelFile]) -> None:
    outputs = outputs_of()
    points = drawn_by(draw_divergence(outputs, files)).collections[0].get_offsets().tolist()
    assert points == [
        [pytest.approx(file.path.stat().st_size / 2**20), its.kl.value]
        for file, its in zip(files[1:], outputs.divergences, strict=True)
    ]


def error(layer: int, n_bytes: int, x2: float, e2: float) -> WeightError:
    type_ = BY_NAME["Q8_0"]
    sums = Sums(1, x2, x2, e2)
    return WeightError(
        f"blk.{layer}.w", layer, "w", type_, type_, 1, n_bytes, sums, *[0.0] * 5, 0, 0.0, 0
    )


def test_errors_are_drawn_by_layer_and_over_bytes() -> None:
    """10 dB and 30 dB in layers 0 and 2, 20 dB outside, for the first of two models."""
    errors = {
        "a": [error(2, 1 << 20, 1000, 1), error(-1, 1 << 19, 100, 1), error(0, 1 << 19, 4, 0.4),
              error(0, 0, 6, 0.6)],
        "b": [error(0, 3 << 20, 10, 0.1)],
    }  # fmt: skip
    assert layers_of([2, -1, 0, 2]) == [0, 2, -1]
    assert layer_names([0, 2, -1]) == ["0", "2", "none"]
    lines, points = map(drawn_by, draw_errors(errors))
    first, second = (line.get_ydata() for line in lines.get_lines()[:2])
    # a gap before what is outside of layers
    assert list(first) == pytest.approx([10, 30, math.nan, 20], nan_ok=True)
    assert second[0] == pytest.approx(20)
    assert np.isnan(second[1:]).all()
    noise, signal = 3.0, 1110.0
    assert points.collections[0].get_offsets().tolist() == [
        [2.0, pytest.approx(math.sqrt(noise / signal))], [3.0, pytest.approx(0.1)]
    ]  # fmt: skip
    assert draw_errors({}) == []


# --- quantize ---


def plans(files: list[ModelFile]) -> list[QuantizationPlan]:
    """Two for a Q8_0 file. The second has Q5_0 in place of Q4_K, and a Q6_K that needs an
    importance matrix."""
    (weight,) = files[0].weights
    q4, q5, q6 = (BY_NAME[name] for name in ("Q4_K", "Q5_0", "Q6_K"))
    tensors = {
        "Q8_0": [TensorPlan(weight, weight.type)],
        "Q4_K_M": [
            TensorPlan(weight, q5, q4), TensorPlan(weight, q5, q4),
            TensorPlan(weight, q6, None, needs_imatrix=True),
        ],
    }  # fmt: skip
    return [
        QuantizationPlan(Path("in/m.gguf"), 4 * 272 * len(of), name, of, header_bytes=96)
        for name, of in tensors.items()
    ]


def test_sizes_of_files_that_were_written_or_would_be(files: list[ModelFile]) -> None:
    """Rows of 256: 272 bytes in Q8_0, 176 in Q5_0, 210 in Q6_K; tensors begin at multiples of
    32."""
    paths = [Path("out/a.gguf"), Path("out/b.gguf")]
    sizes, fell = quantization_reports(plans(files), paths, written=True)
    assert sizes.title == "Quantized from m.gguf into out"
    mixed = 4 * (176 + 176 + 210)
    padded = 2 * 4 * 176 + 864
    assert sizes.rows == [
        ["a.gguf", "Q8_0", 96 + 1088, 8.5, 1.0, 0, None],
        ["b.gguf", "Q4_K_M", 96 + padded, 8 * mixed / (3 * 1024), mixed / (3 * 1088), 2,
         "imatrix"],
    ]  # fmt: skip
    assert sizes.notes == ["Quantized before: 3 tensors, whose errors add up."]
    assert [figure[0] for figure in sizes.figures.values()] == [1088, 3]
    assert fell.rows == [["Q4_K_M", "Q4_K", "Q5_0", 2, "256", "t"]]
    would, again = quantization_reports(plans(files), paths, written=False)
    assert would.title == "What m.gguf would become"
    assert [column.name for column in would.columns] == [c.name for c in sizes.columns][1:]
    assert would.rows == [row[1:] for row in sizes.rows]
    assert again.rows == fell.rows
    (alone,) = quantization_reports(plans(files)[:1], [Path("a.gguf")], written=True)
    assert (alone.title, alone.notes) == ("Quantized from m.gguf", [])
    assert list_tensors(plans(files)).rows == [
        ["Q8_0", "t", "256x4", "Q8_0", "Q8_0", None, 1088],
        ["Q4_K_M", "t", "256x4", "Q8_0", "Q5_0", "Q4_K", 704],
        ["Q4_K_M", "t", "256x4", "Q8_0", "Q5_0", "Q4_K", 704],
        ["Q4_K_M", "t", "256x4", "Q8_0", "Q6_K", None, 840],
    ]


# --- what is computed ---


@pytest.mark.parametrize(
    ("n_vocab", "batch"),
    [(64, 512), (32_768, 512), (32_769, 448), (128_256, 128), (262_144, 64), (262_145, 64),
     (10**6, 64)],
)  # fmt: skip
def test_logits_in_memory_take_64_mib_at_most(n_vocab: int, batch: int) -> None:
    """Rows come in multiples of 64, and there are at least 64."""
    assert logits._choose_batch(n_vocab) == batch


@pytest.mark.parametrize(
    ("ctx", "batch", "slices"),
    [
        (8, 512, [(0, 4), (4, 8)]),
        (9, 2, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]),
        (512, 512, [(0, 256), (256, 512)]),
        (300, 64, [(0, 64), (64, 128), (128, 150), (150, 214), (214, 278), (278, 300)]),
    ],
)
def test_a_slice_lies_in_one_half_of_a_chunk(
    ctx: int, batch: int, slices: list[tuple[int, int]]
) -> None:
    assert list(logits._slices(ctx, batch)) == slices


def test_a_chunk_has_eight_tokens_at_least(files: list[ModelFile]) -> None:
    check_comparison(files, OutputOptions(ctx=8))
    with pytest.raises(UsageError, match="--ctx is 7; it must be at least 8"):
        check_comparison(files, OutputOptions(ctx=7))


def test_every_token_has_the_same_text_in_both(tmp_path: Path) -> None:
    def model(name: str, tokens: list[str], weights: int = 1) -> ModelFile:
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_token_list(tokens)
        for i in range(weights):
            writer.add_tensor(f"t{i}", np.zeros(32, np.float32))
        save(writer)
        return load_model_file(tmp_path / name)

    one = model("one.gguf", ["a", "b"])
    check_comparison([one, model("same.gguf", ["a", "b"])], OutputOptions())
    with pytest.raises(UsageError, match=r"different vocabularies: 3 and 2 tokens$"):
        check_comparison([one, model("more.gguf", ["a", "b", "c"])], OutputOptions())
    with pytest.raises(UsageError, match=r"different vocabularies: token 1 is 'c' and 'b'$"):
        check_comparison([one, model("other.gguf", ["a", "c"])], OutputOptions())
    with pytest.raises(UsageError, match="contains only a vocabulary"):
        check_comparison([one, model("none.gguf", ["a", "b"], 0)], OutputOptions())
