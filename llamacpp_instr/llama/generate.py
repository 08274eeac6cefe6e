"""From texts to tokens, and from tokens to a continuation or an embedding.

Texts are turned into tokens in a child process. A vocabulary may lack what its tokenizer needs, and
a text of a megabyte may take minutes. A chat template is a program in the model file: it may fail
in any way, take any memory, or never end.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.processes import limited_memory
from llamacpp_instr.base.terminal import counted, notice
from llamacpp_instr.llama.crashes import ChildEnded, call_in_child
from llamacpp_instr.llama.engine import CObject, LoadedModel, ModelContext
from llamacpp_instr.llama.log import Interrupt, captured

_MAX_BYTES = 2 << 30
"""memory that a vocabulary and a chat template may take"""
_SECONDS = 2
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


Finish = Literal["end", "length", "context"]
"""Why generation stopped: the model ended it, `n` tokens were generated, the context is full."""


def tokenize(
    path: Path, texts: Sequence[str], *, chat: bool = False, parse_special: bool = True
) -> list[list[int]]:
    """The tokens of each text, by the vocabulary of the model at `path`. With `chat`, each text is
    first rendered with the model's chat template. Prints llama.cpp's warnings about the texts, such
    as one about a second beginning-of-sequence token. The tokens equal those of
    `LoadedModel.tokenize`. Raises `UsageError` if the tokenizer or the template does not work."""
    max_bytes = _MAX_BYTES + _BYTES_OF_TEXT * sum(map(len, texts))
    imports = ["llama_cpp.llama_chat_format"] if chat else []
    try:
        tokens, warnings = call_in_child(
            max_bytes, _tokenize, path, texts, chat, parse_special, imports=imports
        )
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
        log.take_pending()  # loading the whole model prints these again
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

    begin, end = model.api.llama_vocab_bos(model.vocab), model.api.llama_vocab_eos(model.vocab)
    bos, eos = model.token_text(begin), model.token_text(end)
    try:
        with limited_memory(_TEMPLATE_BYTES), _limited_time():
            formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
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
    return text.removeprefix(bos) if model.adds_bos else text


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


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. At temperature 0, always the most probable one."""

    temp: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise `UsageError` for a value that is out of range or would have no effect."""
        if not 0 <= self.temp <= 100:
            raise UsageError(f"--temp is {self.temp}; it must be from 0 (greedy) to 100")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k is {self.top_k}; it must be at least 1")
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"--{name} is {value}; it must be from 0 to 1")
        if self.seed is not None and not 0 <= self.seed < 2**32 - 1:
            raise UsageError(f"--seed is {self.seed}; it must be from 0 to {2**32 - 2}")
        for name in ("top_k", "top_p", "min_p"):
            if self.temp == 0 and getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} has no effect on greedy sampling; add --temp")

    def with_seed(self) -> Sampling:
        """A copy with a seed, so that the run can be repeated."""
        if self.temp == 0 or self.seed is not None:
            return self
        seed = random.SystemRandom().randrange(2**32 - 1)
        return replace(self, seed=seed)


class Sampler(CObject):
    """llama.cpp's own sampler chain for one context."""

    def __init__(self, context: ModelContext, sampling: Sampling) -> None:
        sampling.check()
        self.api = context.api
        self.context = context
        params = self.api.llama_sampler_chain_default_params()
        self.handle = self.api.llama_sampler_chain_init(params)
        self.free = self.api.llama_sampler_free
        for link in self._links(sampling.with_seed()):
            self.api.llama_sampler_chain_add(self.handle, link)

    def sample(self, token: int = -1) -> int:
        """Choose a token from the logits that were computed last, or from those of batch position
        `token` if several positions have logits."""
        return int(self.api.llama_sampler_sample(self.handle, self.context.handle, token))

    def _links(self, sampling: Sampling) -> list[int]:
        api = self.api
        if sampling.temp == 0:
            return [api.llama_sampler_init_greedy()]
        # llama.cpp's own order: first remove unlikely tokens, then apply the temperature
        links = []
        if sampling.top_k is not None:
            links.append(api.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p is not None:
            links.append(api.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p is not None:
            links.append(api.llama_sampler_init_min_p(sampling.min_p, 1))
        temp, dist = api.llama_sampler_init_temp, api.llama_sampler_init_dist
        return [*links, temp(sampling.temp), dist(sampling.seed)]


def generate(
    context: ModelContext,
    prompt: Sequence[int],
    sampler: Sampler,
    n: int,
    emit: Callable[[int], None],
    stop_at_end: bool = True,
) -> Finish:
    """Compute `prompt`, then up to `n` tokens; call `emit` with each, and return why it stopped.

    The model's end-of-generation token is not emitted. It stops the generation unless
    `stop_at_end` is False.
    """
    check_prompt(context, prompt)
    used = _prefill(context, prompt)
    for count in range(1, n + 1):
        token = sampler.sample()
        if stop_at_end and context.model.is_end(token):
            return "end"
        emit(token)
        if count == n:
            break
        if used == context.size:
            return "context"
        context.decode([token])
        used += 1
    return "length"


def embed(context: ModelContext, prompt: Sequence[int]) -> list[float]:
    """The pooled embedding of `prompt`: as many values as the model's width, not normalized."""
    check_prompt(context, prompt)
    context.clear()
    if context.model.has_encoder:
        context.encode(prompt)
    else:
        context.decode(prompt)
    values = context.embedding(len(prompt))
    if values is None:
        raise UsageError(f"{context.model.path}: the model returns no embeddings")
    return values


def check_prompt(context: ModelContext, prompt: Sequence[int]) -> None:
    """Raise `UsageError` for a prompt that the context cannot take."""
    if not prompt:
        raise UsageError(
            "the prompt is empty and the model adds no BOS token, so there is nothing to compute; "
            "give some text"
        )
    if len(prompt) > context.size:
        raise UsageError(
            f"the prompt has {counted(len(prompt), 'token')}, the context holds {context.size}; "
            "make the context larger"
        )
    if context.takes_whole_prompts and len(prompt) > context.n_batch:
        raise UsageError(
            f"the prompt has {len(prompt):,} tokens, but this model computes a prompt in one "
            f"batch, here of at most {context.n_batch}; make n_batch and n_ubatch larger"
        )


def _prefill(context: ModelContext, prompt: Sequence[int]) -> int:
    """Compute the prompt; return how many tokens are then in the decoder's cache."""
    if context.model.has_encoder:
        context.encode(prompt)
        prompt = [context.model.start_token]
    step = context.n_batch
    for start in range(0, len(prompt), step):
        context.decode(prompt[start : start + step])
    return len(prompt)
