"""Renders a prompt with the model's own chat template.

A template is a program in the model file: it may fail in any way, take any memory, or never end. So
it runs in a child process (`prompts`), with limits of memory and time.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from llamacpp_instr.errors import UsageError
from llamacpp_instr.llama.child import limited_memory
from llamacpp_instr.llama.engine import LoadedModel

SECONDS = 5
"""CPU time that a template may take; real ones take milliseconds"""
TIME_IS_UP = getattr(signal, "SIGPROF", -1)
"""the signal that ends the process after that"""
_MOST_BYTES = 1 << 28
"""memory that a template may take; real ones take a few megabytes"""
_MOST_TEXT = 1 << 16
"""characters that a template may add beyond eight times the prompt; tokenizing a few hundred
special tokens takes no time, a hundred thousand take minutes"""


def render_chat(model: LoadedModel, prompt: str) -> str:
    """The text of a conversation in which the user said `prompt` and the model answers next.

    Pass the result to `LoadedModel.tokenize`; it lacks the BOS that the tokenizer adds. The signal
    `TIME_IS_UP` ends the process if the template takes more than `SECONDS`.
    """
    template = model.chat_template()
    if not template:
        raise UsageError(f"{model.path} has no chat template; leave out --chat")
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    try:
        with limited_memory(_MOST_BYTES), _limited_time():
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
    """End the process if the block computes for more than `SECONDS`. An exception would wait for
    the current C call to return, which may never happen."""
    if not hasattr(signal, "setitimer"):  # not on this operating system
        yield
        return
    signal.signal(TIME_IS_UP, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
