"""What a model is validated on."""

from __future__ import annotations

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.engine import LoadedModel

TOKENS = 32
"""of the prompt, if none is given"""


def check_only_decodes(model: LoadedModel) -> None:
    """Raises `UsageError` for a model with an encoder."""
    if model.has_encoder or not model.has_decoder:
        raise UsageError(f"{model.path} has an encoder; models that only decode can be validated")


def prompt_tokens(model: LoadedModel, prompt: str | None) -> list[int]:
    """The tokens of a prompt; without one, TOKENS of the vocabulary, which any model has."""
    if prompt is not None:
        return list(model.tokenize(prompt))
    return [(7 * i + 3) % model.n_vocab for i in range(TOKENS)]
