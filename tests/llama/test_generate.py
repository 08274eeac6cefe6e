"""Token ids through every kind of model, without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.generate import Sampler, Sampling, check_prompt, embed, generate
from llamacpp_instr.llama.log import captured

pytestmark = pytest.mark.native

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@contextmanager
def opened(path: Path, embed_tokens: int = 0, **options: int) -> Iterator[ModelContext]:
    with (
        captured() as log,
        LoadedModel(path, log) as model,
        ModelContext(model, ContextOptions(threads=1, **options), embed_tokens) as context,  # type: ignore[arg-type]
    ):
        yield context


def run_tokens(context: ModelContext, prompt: list[int], n: int) -> list[int]:
    """The greedy tokens after a prompt, each computed; none of a model that only encodes."""
    check_prompt(context, prompt)
    context.clear()
    if not context.memory:
        compute = context.decode if context.model.has_decoder else context.encode
        compute(prompt)
        return []
    tokens: list[int] = []
    with Sampler(context, Sampling()) as sampler:
        generate(context, prompt, sampler, n, tokens.append, stop_at_end=False)
    return tokens


@pytest.mark.parametrize(
    ("name", "n"), [("llama", 5), ("gpt2", 5), ("no_tokenizer", 5), ("t5", 5), ("bert", 0)]
)
def test_every_kind_of_model_runs_and_repeats_itself(models: Path, name: str, n: int) -> None:
    with opened(models / f"{name}.gguf") as context:
        first = run_tokens(context, PROMPT, 5)
        assert len(first) == n
        assert run_tokens(context, PROMPT, 5) == first


def test_batches_that_end_anywhere_change_nothing(models: Path) -> None:
    with opened(models / "llama.gguf") as context:
        expected = run_tokens(context, PROMPT, 9)
    for batch, ubatch in ((1, 1), (3, 2), (8, 3), (100, 5)):
        with opened(models / "llama.gguf", batch=batch, ubatch=ubatch) as context:
            assert run_tokens(context, PROMPT, 9) == expected


def test_a_context_is_filled_to_its_last_place(models: Path) -> None:
    with opened(models / "llama.gguf", ctx=10) as context:
        # two more tokens fit, and one is sampled from the last
        assert len(run_tokens(context, PROMPT, 99)) == 3


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1] * 11, "11 tokens, the context holds 10"),
        ([64], "token 64 is not in the vocabulary of 64"),
        ([-1], "token -1 is not in the vocabulary"),
    ],
)
def test_what_ggml_would_abort_at_is_refused(models: Path, prompt: list[int], words: str) -> None:
    with opened(models / "llama.gguf", ctx=10) as context:
        with pytest.raises(UsageError, match=words):
            run_tokens(context, prompt, 1)
        assert run_tokens(context, PROMPT, 1), "the context still works"


def test_models_that_cannot_split_say_so(models: Path) -> None:
    for name in ("bert", "t5"):
        with (
            opened(models / f"{name}.gguf", ubatch=4) as context,
            pytest.raises(UsageError, match="one batch, here of at most 4"),
        ):
            run_tokens(context, PROMPT, 1)


def test_an_embedding_without_pooling_is_the_mean_of_its_tokens(models: Path) -> None:
    """In a causal model the first token's vector does not depend on later tokens."""
    with opened(models / "llama.gguf", embed_tokens=8) as context:
        one, two = (embed(context, PROMPT[:n]) for n in (1, 2))
        context.clear()
        context.decode(PROMPT[:2])
        second = context.api.llama_get_embeddings_ith(context.handle, 1)[:32]
    assert two == pytest.approx([(a + b) / 2 for a, b in zip(one, second, strict=True)], abs=1e-5)
