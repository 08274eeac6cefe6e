"""Turns texts into tokens, in a child process (see `child`).

A vocabulary may lack what its tokenizer needs, and a text of a megabyte may take minutes. A chat
template is a program in the model file: it may fail in any way, take any memory, or never end. The
tokens equal those of `LoadedModel.tokenize`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import notice
from llamacpp_instr.llama.child import ChildEnded, call_in_child, limited_memory
from llamacpp_instr.llama.engine import LoadedModel
from llamacpp_instr.llama.interrupt import Interrupt
from llamacpp_instr.llama.log import captured

_MAX_BYTES = 2 << 30
"""memory that a vocabulary and a chat template may take"""
_SECONDS = 5
"""CPU time that a template may take; real ones take milliseconds"""
_TIME_IS_UP = getattr(signal, "SIGPROF", -1)
"""the signal that ends the process after that"""
_TEMPLATE_BYTES = 1 << 28
"""memory that a template may take; real ones take a few megabytes"""
_MOST_TEXT = 1 << 16
"""characters that a template may add beyond eight times the prompt; tokenizing a few hundred
special tokens takes no time, a hundred thousand take minutes"""
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
        if end.number == _TIME_IS_UP:
            raise UsageError(
                f"{path}: its chat template did not end within {_SECONDS} s; leave out --chat"
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
        log.take_pending()  # loading the whole model gives these again
        if chat:
            texts = [_render_chat(model, text) for text in texts]
        return [model.tokenize(text, parse_special) for text in texts], log.take_pending()


def _render_chat(model: LoadedModel, prompt: str) -> str:
    """The text of a conversation in which the user said `prompt` and the model answers next.

    Pass the result to `LoadedModel.tokenize`; it lacks the BOS that the tokenizer adds. The signal
    `_TIME_IS_UP` ends the process if the template takes more than `_SECONDS`.
    """
    template = model.chat_template()
    if not template:
        raise UsageError(f"{model.path} has no chat template; leave out --chat")
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    try:
        with limited_memory(_TEMPLATE_BYTES), _limited_time():
            formatter = Jinja2ChatFormatter(template, eos_token=model.eos, bos_token=model.bos)
            text: str = formatter(messages=[{"role": "user", "content": prompt}]).prompt
        text.encode()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{model.path}: its chat template cannot be rendered: {reason}") from None
    if len(text) > 8 * len(prompt) + _MOST_TEXT:
        raise UsageError(
            f"{model.path}: its chat template turns a prompt of {len(prompt):,} characters into "
            f"{len(text):,}; leave out --chat"
        )
    if model.adds_bos and model.bos:
        text = text.removeprefix(model.bos)
    return text


@contextmanager
def _limited_time() -> Iterator[None]:
    """End the process if the block computes for more than `_SECONDS`. An exception would wait for
    the current C call to return, which may never happen."""
    if not hasattr(signal, "setitimer"):  # not on this operating system
        yield
        return
    signal.signal(_TIME_IS_UP, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
