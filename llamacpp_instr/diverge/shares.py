"""The share of each weight in the KL divergence, from computes with mixtures of two models.

A tensor of A is made to describe the memory of B's: its type, its strides, where its values lie.
Nothing is copied, and any pair of types can be mixed. A context that is made afterwards builds its
graphs from what the tensors describe, as it would for a file with the same tensors. Weights are
measured in groups, then one by one within the large ones.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from llamacpp_instr.base.system import place
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.debugger.tensors import Tensor, tensor_at
from llamacpp_instr.lab.quality.divergence import kl_divergences
from llamacpp_instr.lab.quality.logits import logits_of
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.model.file import NamedTensor, role_of

SMALL = 0.01
"""A group with a smaller share of the sum is not divided: its weights cannot matter."""


@dataclass(frozen=True)
class Share:
    """Weights that were exchanged together, and nothing else."""

    names: tuple[str, ...]
    layer: int
    part: str
    """`attention`, `feed-forward`, or the role of a single weight"""
    kl: float
    """the KL divergence, in nats, of A with these weights of B"""


@dataclass(frozen=True)
class Shares:
    """All weights that differ, each in one share."""

    shares: list[Share]
    whole: float
    """the KL divergence, in nats, with all weights exchanged"""
    exchanges: int
    """how many were measured"""

    @property
    def sum(self) -> float:
        return sum(share.kl for share in self.shares)

    def predicted(self, names: Collection[str]) -> float:
        """The KL divergence of a mixture with these weights of B, if shares add up. A part of a
        group counts by the number of its weights."""
        return sum(
            share.kl * len([name for name in share.names if name in names]) / len(share.names)
            for share in self.shares
        )


def measure_shares(
    kl_of: Callable[[Collection[str]], float], names: Sequence[str], on_progress: OnProgress
) -> Shares:
    """`kl_of` measures an exchange of weights, `names` are those that differ. `on_progress` gets
    exchanges made and expected."""
    groups = _groups(names)
    done, total = 0, len(groups) + 1

    def share(of: Sequence[str], layer: int, part: str) -> Share:
        nonlocal done
        kl = kl_of(frozenset(of))
        done += 1
        on_progress(done, total)
        return Share(tuple(of), layer, part, kl)

    whole = share(names, -1, "").kl if names else 0.0
    shares = [share(of, layer, part) for (layer, part), of in groups.items()]
    least = SMALL * sum(of.kl for of in shares)
    large = [of for of in shares if len(of.names) > 1 and of.kl >= least > 0]
    total += sum(len(group.names) for group in large)
    for group in large:
        parts = [share([name], group.layer, role_of(name)) for name in group.names]
        at = shares.index(group)
        shares[at : at + 1] = parts
    return Shares(shares, whole, done)


def _groups(names: Sequence[str]) -> dict[tuple[int, str], list[str]]:
    """Attention and feed-forward of each layer; a weight outside the layers is alone."""
    found: dict[tuple[int, str], list[str]] = {}
    tensor = NamedTensor()
    for name in names:
        tensor.name = name
        part = tensor.role
        if tensor.layer >= 0:
            part = "feed-forward" if "ffn" in part or "exp" in part else "attention"
        found.setdefault((tensor.layer, part), []).append(name)
    return found


@dataclass(frozen=True)
class SharedWeight:
    """A weight in the memory of both models, which the same node reads."""

    name: str
    """in A"""
    a: int
    """the address of its tensor in A"""
    b: int


_FIELDS = ("type", "buffer", "nb", "data", "extra")


@contextmanager
def exchanged(weights: Collection[SharedWeight]) -> Iterator[None]:
    """Inside, A's tensors are those of B. Nothing may be computed when the block begins or ends."""
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


@contextmanager
def mixtures(
    model: LoadedModel,
    weights: Sequence[SharedWeight],
    chunks: Sequence[Sequence[int]],
    options: ContextOptions,
) -> Iterator[Callable[[Collection[str]], float]]:
    """A function that measures the mean KL divergence, in nats, of A with these weights of B, over
    all tokens. A's logits are in a temporary file."""

    def logits_in(context: ModelContext) -> Iterator[np.ndarray]:
        for chunk in chunks:
            context.clear()
            for start in range(0, len(chunk), context.n_batch):
                part = chunk[start : start + context.n_batch]
                context.decode(part, all_logits=True)
                yield logits_of(context, len(part))

    def kl_of(names: Collection[str]) -> float:
        file.seek(0)
        chosen = [weight for weight in weights if weight.name in names]
        compared = [str(model.path), f"{model.path} with weights of B"]
        found = []
        with exchanged(chosen), ModelContext(model, options) as context:
            for logits in logits_in(context):
                data = file.read(logits.nbytes)
                of_a = np.frombuffer(data, np.float32).reshape(logits.shape)
                found.append(kl_divergences(compared, of_a, logits))
        total = sum(float(kl.sum(dtype=np.float64)) for kl in found)
        return total / sum(map(len, found))

    with tempfile.TemporaryFile(dir=place()) as file:
        with ModelContext(model, options) as context:
            for logits in logits_in(context):
                file.write(logits.tobytes())
        yield kl_of
