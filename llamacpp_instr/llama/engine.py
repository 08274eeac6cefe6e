"""A model and a context of llama.cpp, checked before every call that would abort the process.

ggml ends the process on misuse (`GGML_ASSERT`). Wrong input is refused here first, with a
`UsageError`. C objects are always freed.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.llama import native
from llamacpp_instr.llama.devices import ANYWHERE, Placement
from llamacpp_instr.llama.log import LlamaFailed, LlamaLog
from llamacpp_instr.llama.threads import MAX_THREADS, default_threads
from llamacpp_instr.model.adapter import Adapter
from llamacpp_instr.model.header import read_header
from llamacpp_instr.model.hyper_parameters import check_hyper_parameters

CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30,
    "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7,
}  # fmt: skip
"""storage types that llama.cpp's own tools allow for a KV cache, with ggml's numbers"""

FLASH_ATTN = {"auto": -1, "on": 1, "off": 0}

DEFAULT_CTX = 4096
"""default context size in tokens for models that were trained on more"""

_MAX_TOKENS = 2**31 - 256
_POSITIONS = "position_embd.weight"
_CACHE_BLOCK = 32  # elements in a block of every quantized cache type


@dataclass(frozen=True)
class ContextOptions:
    """Options of a context; None selects the default."""

    ctx: int | None = None
    batch: int | None = None
    ubatch: int | None = None
    threads: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"

    def check(self) -> None:
        """Raise `UsageError` for a value that is wrong for every model."""
        for name in ("ctx", "batch", "ubatch"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MAX_TOKENS:
                raise UsageError(f"--{name} is {value}; it must be from 1 to {_MAX_TOKENS}")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"--threads is {self.threads}; it must be from 1 to {MAX_THREADS}")
        for name, allowed in (
            ("cache_type_k", CACHE_TYPES),
            ("cache_type_v", CACHE_TYPES),
            ("flash_attn", FLASH_ATTN),
        ):
            value = getattr(self, name)
            if value not in allowed:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {value!r} is not one of {', '.join(allowed)}")
        if self.flash_attn == "off" and is_quantized(self.cache_type_v):
            raise UsageError(
                f"--cache-type-v {self.cache_type_v} needs flash attention: llama.cpp supports a "
                "quantized V cache only with it; leave out --flash-attn off"
            )


_Self = TypeVar("_Self", bound="CObject")


class CObject:
    """An object of llama.cpp, which is freed once, at the end of a `with` block."""

    handle: int | None
    free: Callable[[int], object]

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle:
            self.free(self.handle)
            self.handle = None


class LoadedModel(CObject):
    """A loaded model and its vocabulary."""

    def __init__(
        self, path: Path, log: LlamaLog, mmap: bool = True, placement: Placement = ANYWHERE,
        **settings: object,
    ) -> None:  # fmt: skip
        """Load `path`, a file that `load_model_file` and `placement` have accepted. `settings` are
        fields of `llama_model_params`."""
        header = read_header(path)
        check_hyper_parameters(path, header)
        self.path = path
        self.api: Any = native.import_llama_cpp().llama_cpp
        self.log = log
        self.api.llama_backend_init()
        params = self.api.llama_model_default_params()
        if not mmap:
            params.load_mode = self.api.LLAMA_LOAD_MODE_NONE
        self._placed = placement.settings()  # the model points into them
        for name, value in (settings | self._placed).items():
            setattr(params, name, value)
        go_on = self.api.llama_progress_callback(lambda *_: not log.interrupt.requested)
        params.progress_callback = go_on
        with log.trying(lambda why: UsageError(f"{path}: llama.cpp cannot load it: {why}")):
            self.handle = self.api.llama_model_load_from_file(os.fsencode(path), params)
            if not self.handle:
                raise LlamaFailed
        self.free = self.api.llama_model_free
        self.vocab = self.api.llama_model_get_vocab(self.handle)
        api, handle, vocab = self.api, self.handle, self.vocab
        self.has_tokenizer = bool(api.llama_vocab_type(vocab) != api.LLAMA_VOCAB_TYPE_NONE)
        """whether text can be turned into tokens"""
        self.has_encoder = bool(api.llama_model_has_encoder(handle))
        """whether `llama_encode` is called before, or instead of, `llama_decode`"""
        self.has_decoder = bool(api.llama_model_has_decoder(handle))
        self.is_diffusion = bool(api.llama_model_is_diffusion(handle))
        self.n_vocab = int(api.llama_vocab_n_tokens(vocab))
        self.n_ctx_train = int(api.llama_model_n_ctx_train(handle))
        self.adds_bos = bool(api.llama_vocab_get_add_bos(vocab))
        """whether `tokenize` adds the beginning-of-sequence token"""
        self.n_positions = next((t.ne[1] for t in header.tensors if t.name == _POSITIONS), None)
        """rows of the learned position embedding, or None; ggml aborts on positions beyond them"""

        self.adapters: list[tuple[Any, float]] = []
        """those that later contexts use, and their scales; freed with the model"""

    def use(self, adapters: Sequence[Adapter]) -> None:
        """Let contexts that are made later use these adapters, which `check_adapter` accepted."""
        self.adapters += [(self._adapter(of.path), of.scale) for of in adapters]

    def _adapter(self, path: Path) -> Any:
        with self.log.trying(lambda why: UsageError(f"{path}: llama.cpp cannot load it: {why}")):
            handle = self.api.llama_adapter_lora_init(self.handle, os.fsencode(path))
            if not handle:
                raise LlamaFailed
        return handle

    @property
    def start_token(self) -> int:
        """The token that the decoder of an encoder-decoder model begins with, or -1."""
        token = int(self.api.llama_model_decoder_start_token(self.handle))
        return token if token >= 0 else int(self.api.llama_vocab_bos(self.vocab))

    def metadata(self, key: str) -> str | None:
        """The text of a metadata value, or None."""
        size = self.api.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        self.api.llama_model_meta_val_str(self.handle, key.encode(), buffer, size + 1)
        return buffer.value.decode(errors="replace")

    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), or None."""
        template: bytes | None = self.api.llama_model_chat_template(self.handle, None)
        return template.decode(errors="replace") if template else None

    def token_text(self, token: int) -> str:
        """A token's text in the vocabulary; empty for -1, which means that no token exists."""
        if not 0 <= token < self.n_vocab:
            return ""
        text: bytes = self.api.llama_vocab_get_text(self.vocab, token)
        return text.decode(errors="replace")

    def tokenize(self, text: str, parse_special: bool = True) -> list[int]:
        """The tokens of a text, with the special tokens that the model expects around it. With
        `parse_special`, names of special tokens in the text become these tokens."""
        if not self.has_tokenizer:
            raise UsageError(f"{self.path} has no tokenizer, so it cannot take a text prompt")
        data = text.encode()
        special = True, parse_special
        needed = self.api.llama_tokenize(self.vocab, data, len(data), None, 0, *special)
        tokens = (ctypes.c_int32 * abs(needed))()
        got = self.api.llama_tokenize(self.vocab, data, len(data), tokens, abs(needed), *special)
        if got < 0:
            raise InstrError(f"{self.path}: llama.cpp could not tokenize the prompt")
        return list(tokens[:got])

    def piece(self, token: int) -> bytes:
        """The bytes of a token; the bytes of a character may be spread over several tokens."""
        size = -64
        while size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = self.api.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:size]

    def is_end(self, token: int) -> bool:
        """Whether the token ends the generation."""
        return bool(self.api.llama_vocab_is_eog(self.vocab, token))


class ModelContext(CObject):
    """A context of a model: its memory, and the batches that it computes."""

    def __init__(self, model: LoadedModel, options: ContextOptions, embed_tokens: int = 0) -> None:
        """`embed_tokens` > 0 makes a context for embeddings of prompts of up to that length."""
        options.check()
        self.model = model
        self.api = model.api
        self._check_cache_types(options)
        params = self._params(options, embed_tokens)
        self.size, self.embeds = int(params.n_ctx), bool(params.embeddings)
        abort, argument = model.log.interrupt.abort_callback()
        params.abort_callback = self.api.ggml_abort_callback(abort)
        params.abort_callback_data = argument
        with model.log.trying(
            lambda why: UsageError(f"{model.path}: llama.cpp cannot make a context for it: {why}")
        ):
            self.handle = self.api.llama_init_from_model(model.handle, params)
            if not self.handle:
                raise LlamaFailed
        self.free = self.api.llama_free
        self.memory = self.api.llama_get_memory(self.handle)
        if n := len(model.adapters):
            handles, scales = zip(*model.adapters, strict=True)
            kind = self.api.llama_adapter_lora_p_ctypes
            self.api.llama_set_adapters_lora(
                self.handle, (kind * n)(*handles), n, (ctypes.c_float * n)(*scales)
            )

    def _params(self, options: ContextOptions, embed_tokens: int) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx = self._choose_size(options.ctx, embed_tokens)
        params.n_batch = options.batch or max(params.n_batch, embed_tokens)
        # pooling sees one ubatch only, so a prompt must fit into it
        params.n_ubatch = options.ubatch or max(params.n_ubatch, embed_tokens)
        params.n_threads = params.n_threads_batch = options.threads or default_threads()
        params.type_k = CACHE_TYPES[options.cache_type_k]
        params.type_v = CACHE_TYPES[options.cache_type_v]
        params.flash_attn_type = FLASH_ATTN[options.flash_attn]
        params.swa_full = False  # as in llama.cpp's own tools: the cache holds only the window
        params.embeddings = embed_tokens > 0
        return params

    @property
    def pooling(self) -> int:
        return int(self.api.llama_pooling_type(self.handle))

    @property
    def takes_whole_prompts(self) -> bool:
        """Whether a prompt must be computed in one batch."""
        return self.embeds or self.model.has_encoder or not self.memory

    @property
    def n_batch(self) -> int:
        """Maximum number of tokens of one call."""
        n_batch = int(self.api.llama_n_batch(self.handle))
        pools = self.embeds and self.pooling != self.api.LLAMA_POOLING_TYPE_NONE
        if pools or self.model.has_encoder or not self.memory:
            # llama.cpp cannot split these into ubatches
            return min(n_batch, int(self.api.llama_n_ubatch(self.handle)))
        return n_batch

    def clear(self) -> None:
        """Forget every token."""
        if self.memory:
            self.api.llama_memory_clear(self.memory, True)

    def keep(self, n_tokens: int) -> bool:
        """Forget all but the first tokens. Returns False if its memory cannot do that."""
        if n_tokens == 0:
            self.clear()
            return True
        return bool(self.api.llama_memory_seq_rm(self.memory, 0, n_tokens, -1))

    def decode(self, tokens: Sequence[int], all_logits: bool = False) -> None:
        """Compute tokens after those already in the cache; the last one, or all, get logits."""
        self._compute(self.api.llama_decode, tokens, "decode", all_logits)

    def encode(self, tokens: Sequence[int]) -> None:
        """Compute tokens with the encoder."""
        self._compute(self.api.llama_encode, tokens, "encode")

    def time_decodes(self, pieces: Sequence[Sequence[int]]) -> int:
        """Decode one piece after the other, each once the previous result is ready; returns the
        total ns, without the time to make batches of them."""
        batches = [self._batch(tokens) for tokens in pieces]
        status = 0
        with self.model.log.trying(
            lambda why: ComputeError(f"{self.model.path}: decode failed ({status}): {why}")
        ):
            begin = time.monotonic_ns()
            for batch in batches:
                status = self.api.llama_decode(self.handle, batch)
                if status != 0:
                    raise LlamaFailed
                self.api.llama_synchronize(self.handle)
            return time.monotonic_ns() - begin

    def _compute(
        self, function: Any, tokens: Sequence[int], verb: str, all_logits: bool = False
    ) -> None:
        batch = self._batch(tokens, all_logits)
        with self.model.log.trying(
            lambda why: ComputeError(f"{self.model.path}: {verb} failed ({status}): {why}")
        ):
            status = function(self.handle, batch)
            if status != 0:
                raise LlamaFailed

    def _batch(self, tokens: Sequence[int], all_logits: bool = False) -> Any:
        if not 0 < len(tokens) <= self.n_batch:
            raise UsageError(
                f"{len(tokens)} tokens at once; this context takes from 1 to {self.n_batch} "
                "(n_batch, n_ubatch)"
            )
        outside = next((token for token in tokens if not 0 <= token < self.model.n_vocab), None)
        if outside is not None:
            raise UsageError(f"token {outside} is not in the vocabulary of {self.model.n_vocab}")
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self.api.llama_batch_get_one(array, len(tokens))
        batch.array = array  # the batch points into it
        if all_logits or self.takes_whole_prompts:
            batch.logits = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
        return batch

    def embedding(self, n_tokens: int) -> list[float] | None:
        """One vector for the last `n_tokens` tokens; None if the model returns none.

        The model's own pooling makes it, or the mean if the model defines none.
        """
        width = int(self.api.llama_model_n_embd_out(self.model.handle))
        if self.pooling == self.api.LLAMA_POOLING_TYPE_NONE:
            rows = self.api.llama_get_embeddings(self.handle)
            if not rows:
                return None
            import numpy as np

            mean = np.ctypeslib.as_array(rows, (n_tokens, width)).mean(axis=0, dtype=np.float64)
            return [float(value) for value in mean]
        values = self.api.llama_get_embeddings_seq(self.handle, 0)
        if self.pooling == self.api.LLAMA_POOLING_TYPE_RANK:
            width = int(self.api.llama_model_n_cls_out(self.model.handle))
        return list(values[:width]) if values else None

    def _choose_size(self, ctx: int | None, embed_tokens: int) -> int:
        rows = self.model.n_positions
        if ctx and rows and ctx > rows:
            raise UsageError(
                f"{self.model.path}: a context of {ctx} exceeds the {rows} positions that the "
                "model has learned"
            )
        # a file may claim any number, and unsigned numbers above INT_MAX are negative here
        trained = rows or max(self.model.n_ctx_train, 0) or DEFAULT_CTX
        return ctx or min(trained, max(DEFAULT_CTX, embed_tokens))

    def _check_cache_types(self, options: ContextOptions) -> None:
        arch = self.model.metadata("general.architecture")
        for side, part in (("k", "key"), ("v", "value")):
            type_ = getattr(options, f"cache_type_{side}")
            if not is_quantized(type_):
                continue
            for key in (f"{part}_length", f"{part}_length_swa", f"{part}_length_mla"):
                length = self._head_length(f"{arch}.attention.{key}")
                if length % _CACHE_BLOCK:
                    raise UsageError(
                        f"{self.model.path}: --cache-type-{side} {type_} needs heads of a multiple "
                        f"of {_CACHE_BLOCK} values; this model's have {length}"
                    )

    def _head_length(self, key: str) -> int:
        text = self.model.metadata(key)
        if text and text.isdigit():
            return int(text)
        if not key.endswith("_length"):
            return 0
        heads = int(self.api.llama_model_n_head(self.model.handle))
        return int(self.api.llama_model_n_embd(self.model.handle)) // heads if heads else 0


class ComputeError(InstrError):
    """`llama_decode` or `llama_encode` failed."""


def is_quantized(cache_type: str) -> bool:
    """Whether the type of a KV cache is quantized."""
    return "q" in cache_type
