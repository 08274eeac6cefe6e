"""Turns texts into tokens, in a child process (see `child`).

A vocabulary may lack what its tokenizer needs, a chat template is a program in the model file, and
a text of a megabyte may take minutes. The tokens equal those of `LoadedModel.tokenize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.errors import UsageError
from llamacpp_instr.llama.chat import SECONDS, TIME_IS_UP, render_chat
from llamacpp_instr.llama.child import ChildEnded, call_in_child
from llamacpp_instr.llama.engine import LoadedModel
from llamacpp_instr.llama.interrupt import Interrupt
from llamacpp_instr.llama.log import captured
from llamacpp_instr.terminal import notice

_MAX_BYTES = 2 << 30
"""memory that a vocabulary and a chat template may take"""
_BYTES_OF_TEXT = 256
"""memory that the tokenizers may take for each byte of text"""


def tokenize(
    path: Path, texts: Sequence[str], *, chat: bool = False, parse_special: bool = True
) -> list[list[int]]:
    """The tokens of each text, by the vocabulary of the model at `path`. With `chat`, each text is
    first rendered with the model's chat template. Prints llama.cpp's warnings about the texts, such
    as that of a second beginning-of-sequence token.

    Raises `UsageError` for a model whose tokenizer or template does not work.
    """
    max_bytes = _MAX_BYTES + _BYTES_OF_TEXT * sum(map(len, texts))
    try:
        tokens, warnings = call_in_child(max_bytes, _tokenize, path, texts, chat, parse_special)
    except ChildEnded as end:
        if end.number == TIME_IS_UP:
            raise UsageError(
                f"{path}: its chat template did not end within {SECONDS} s; leave out --chat"
            ) from None
        raise UsageError(
            f"{path}: its tokenizer does not work: llama.cpp ended the process: {end}"
        ) from None
    for warning in dict.fromkeys(warnings):
        notice(f"llama.cpp: {warning}")
    return tokens


def _tokenize(
    path: Path, texts: Sequence[str], chat: bool, parse_special: bool
) -> tuple[list[list[int]], list[str]]:
    """The tokens of each text, and warnings."""
    # without its weights
    with captured(Interrupt()) as log, LoadedModel(path, log, vocab_only=True) as model:
        log.take_held()  # loading the whole model gives these again
        if chat:
            texts = [render_chat(model, text) for text in texts]
        return [model.tokenize(text, parse_special) for text in texts], log.take_held()
