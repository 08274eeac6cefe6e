"""What is recorded to measure kernels."""

from __future__ import annotations

import pytest

from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction.recorded import (
    CONTEXT,
    SUBJECTS,
    Run,
    Subject,
)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda of: of.name)
def test_the_models_are_whole_blocks_of_each_type_and_hold_their_runs(subject: Subject) -> None:
    shape = subject.shape
    assert shape.width % shape.heads == shape.heads % shape.kv_heads == 0
    assert shape.width // shape.heads in (64, 128, 256)
    for type_ in subject.types:
        for length in (shape.width, shape.feed_forward):
            assert length % BY_NAME[type_].block == 0
    assert bool(shape.experts) == bool(shape.used)
    assert shape.used < max(shape.experts, 1)
    for run in subject.runs:
        assert run.times > 1, "the first of each builds its graph"
        assert run.past + run.tokens * run.times <= CONTEXT or run.tokens > 1
        assert run.past + run.tokens <= CONTEXT
        assert run.tokens & (run.tokens - 1) == 0, "a power of two"
    assert Run(1, subject.runs[0].times) == subject.runs[0], "a decode comes first"


def test_subjects_have_names_of_their_own() -> None:
    names = [subject.name for subject in SUBJECTS]
    assert len(set(names)) == len(names)
    assert [of.name for of in SUBJECTS if not of.repack] == ["plain"]
    heads = {of.name: of.shape.width // of.shape.heads for of in SUBJECTS}
    for name, length in heads.items():
        assert not name.startswith("attention-") or name == f"attention-{length}"
