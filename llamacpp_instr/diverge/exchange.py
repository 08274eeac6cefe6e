"""Computes with a mixture of two models that are both in memory.

A tensor of A is made to describe the memory of B's: its type, its strides, where its values lie.
Nothing is copied, and any pair of types can be mixed. A context that is made afterwards builds its
graphs from what the tensors describe, as it would for a file with the same tensors.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, cast

import numpy as np

from llamacpp_instr.base.system import place
from llamacpp_instr.debugger.ggml import Tensor, tensor_at
from llamacpp_instr.diverge.follow import SharedWeight
from llamacpp_instr.lab.quality.divergence import kl_divergences
from llamacpp_instr.lab.quality.logits import logits_of
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext

_FIELDS = ("type", "buffer", "nb", "data", "extra")


@contextmanager
def exchanged(weights: Collection[SharedWeight]) -> Iterator[None]:
    """Inside, A's tensors are those of B. Nothing may be computed when it begins or ends."""
    before = {weight.a: bytes(tensor_at(weight.a)) for weight in weights}
    try:
        for weight in weights:
            ours, theirs = tensor_at(weight.a), tensor_at(weight.b)
            for field in _FIELDS:
                setattr(ours, field, getattr(theirs, field))
        yield
    finally:
        for address, content in before.items():
            ctypes.memmove(address, content, ctypes.sizeof(Tensor))


class Mixer:
    """Measures the KL divergence of mixtures from A. A's logits are in a temporary file."""

    def __init__(
        self,
        model: LoadedModel,
        weights: Sequence[SharedWeight],
        chunks: Sequence[Sequence[int]],
        options: ContextOptions,
    ) -> None:
        self._model, self._weights, self._chunks, self._options = model, weights, chunks, options
        self._file: BinaryIO

    def __enter__(self) -> Mixer:
        self._file = cast("BinaryIO", tempfile.TemporaryFile(dir=place()))
        with ModelContext(self._model, self._options) as context:
            for logits in self._logits(context):
                self._file.write(logits.tobytes())
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def kl_of(self, names: Collection[str]) -> float:
        """The mean KL divergence, in nats, of A with these weights of B, over all tokens."""
        self._file.seek(0)
        chosen = [weight for weight in self._weights if weight.name in names]
        total, n = 0.0, 0
        path = str(self._model.path)
        with exchanged(chosen), ModelContext(self._model, self._options) as context:
            for logits in self._logits(context):
                data = self._file.read(logits.nbytes)
                of_a = np.frombuffer(data, np.float32).reshape(logits.shape)
                kl = kl_divergences([path, f"{path} with weights of B"], of_a, logits)
                total += float(kl.sum(dtype=np.float64))
                n += len(kl)
        return total / n

    def _logits(self, context: ModelContext) -> Iterator[np.ndarray]:
        for chunk in self._chunks:
            context.clear()
            for start in range(0, len(chunk), context.n_batch):
                part = chunk[start : start + context.n_batch]
                context.decode(part, all_logits=True)
                yield logits_of(context, len(part))
