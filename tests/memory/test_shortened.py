"""The memory report for a terminal: many layers, and what is outside of them."""

from __future__ import annotations

from llamacpp_instr.converters.analyses.memory import (
    MANY_LAYERS,
    StoredModel,
    StoredTensor,
    compression_reports,
    shortened,
)
from llamacpp_instr.report.report import condensed
from tests.kit.reports import by_title


def model_of(sizes: list[int]) -> StoredModel:
    """A model with a tensor of each size in its layers, and one outside."""
    tensors = [StoredTensor(f"blk.{i}.ffn_up.weight", "F32", (n,), 4 * n)
               for i, n in enumerate(sizes)]  # fmt: skip
    return StoredModel(
        "m.gguf", "llama", [*tensors, StoredTensor("output.weight", "F32", (7,), 28)]
    )


def layers_of(sizes: list[int]) -> tuple[list[object], str]:
    """The first column of the table of layers as a terminal shows it, and its notes."""
    report = condensed(by_title(shortened(compression_reports(model_of(sizes), [])))["Layers"])
    return [row[0] for row in report.rows], " ".join(report.notes)


def test_what_is_outside_of_layers_is_no_layer() -> None:
    many = MANY_LAYERS
    names, notes = layers_of([32] * many)
    assert (names, notes) == ([*range(many), -1], "")
    names, _ = layers_of([32] * (many + 1))
    assert names == [f"0-{many}", "none"]
    names, notes = layers_of([32, 64, 64, 32] * many)
    assert names[1:] == [", ".join(f"{4 * i + 1}-{4 * i + 2}" for i in range(many)), "none"]
    names, notes = layers_of([32 * (i + 1) for i in range(many + 5)])
    assert names == list(range(4, many + 5)), "the largest"
    assert "Not shown: 5 more rows." in notes
