"""Holding the written file against llama.cpp: its warnings, tokens, logits, loss and stories."""

import ctypes
import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.demo_model.model import Llama
from tools.demo_model.tokenizer import Tokenizer

# As ggml.h counts its log levels.
_WARNING, _ERROR = 3, 4

Floats = NDArray[np.float32]


def can_verify() -> bool:
    """Return whether llama-cpp-python is there to be imported."""
    return importlib.util.find_spec("llama_cpp") is not None


class Reference:
    """The file as llama.cpp sees it."""

    def __init__(self, path: Path, context: int) -> None:
        llama_cpp: Any = importlib.import_module("llama_cpp")
        self.warnings: list[str] = []
        # Kept on self, for llama.cpp does not keep the callback alive.
        self._listener = llama_cpp.llama_log_callback(self._listen)
        llama_cpp.llama_log_set(self._listener, ctypes.c_void_p(0))
        self._llama: Any = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, n_threads=1, logits_all=True, verbose=False
        )

    def _listen(self, level: int, text: bytes, _data: object) -> None:
        if level in (_WARNING, _ERROR):
            self.warnings.append(text.decode(errors="replace").strip())

    def encode(self, text: str) -> list[int]:
        """Return llama.cpp's token ids of a text, the beginning-of-sequence token first."""
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=True, special=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return llama.cpp's text of token ids."""
        text: bytes = self._llama.detokenize(list(ids))
        return text.decode(errors="replace")

    def logits(self, ids: Sequence[int]) -> Floats:
        """Return llama.cpp's logits after each token: [tokens, vocabulary]."""
        self._llama.reset()
        self._llama.eval(list(ids))
        scores: Floats = self._llama.scores[: len(ids)].copy()
        return scores

    def write(self, prompt: str) -> tuple[str, bool]:
        """Return the greedy story with its prompt, and whether it came to its own end."""
        answer = self._llama.create_completion(prompt, max_tokens=None, temperature=0.0, echo=True)
        choice = answer["choices"][0]
        return str(choice["text"]), choice["finish_reason"] == "stop"

    def chat(self, message: str) -> str:
        """Return the greedy answer to one message, through the file's chat template."""
        messages = [{"role": "user", "content": message}]
        answer = self._llama.create_chat_completion(messages, temperature=0.0)
        return str(answer["choices"][0]["message"]["content"])


def differing_texts(reference: Reference, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Return the texts whose ids, or whose text made of the ids again, are not the same in both."""
    return [
        text
        for text in texts
        if tokenizer.encode(text) != reference.encode(text)
        or tokenizer.decode(tokenizer.encode(text)) != reference.decode(reference.encode(text))
    ]


@torch.no_grad()
def logit_difference(reference: Reference, model: Llama, rows: Sequence[list[int]]) -> float:
    """Return the largest difference between PyTorch's and llama.cpp's logits on these rows."""
    return max(
        float(np.abs(model(torch.tensor([row]))[0].numpy() - reference.logits(row)).max())
        for row in rows
    )


def reference_loss(reference: Reference, rows: Sequence[list[int]]) -> float:
    """Return llama.cpp's mean loss in nats per token over whole stories."""
    losses = [loss for row in rows for loss in _losses(reference.logits(row[:-1]), row[1:])]
    return math.fsum(losses) / len(losses)


def _losses(logits: Floats, targets: Sequence[int]) -> list[float]:
    """Return the loss of each target in nats, of logits [tokens, vocabulary]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    totals = np.log(np.exp(wide - top).sum(axis=1)) + top[:, 0]
    return [float(total - wide[at, targets[at]]) for at, total in enumerate(totals)]
