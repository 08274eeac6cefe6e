"""The texts of a context's tokens."""

from __future__ import annotations

import ctypes
from typing import Any

from llamacpp_instr.llama.native import import_llama_cpp


class Vocabulary:
    """The vocabulary of the model of a `llama_context *`."""

    def __init__(self, context: int) -> None:
        self._api: Any = import_llama_cpp().llama_cpp
        model = self._api.llama_get_model(context)
        self._vocab = self._api.llama_model_get_vocab(model)
        self._has_text = self._api.llama_vocab_type(self._vocab) != self._api.LLAMA_VOCAB_TYPE_NONE
        self.n = int(self._api.llama_vocab_n_tokens(self._vocab))

    def text(self, token: int) -> str:
        """A token as text; special tokens by their names, `#5` without a tokenizer."""
        if not self._has_text or not 0 <= token < self.n:
            return f"#{token}"
        buffer = ctypes.create_string_buffer(256)
        size = self._api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(size, 0)].decode(errors="replace")
