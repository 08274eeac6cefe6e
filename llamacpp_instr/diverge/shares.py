"""The share of each weight in the KL divergence: measured by groups, then within the large ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.model.file import NamedTensor, role_of

SMALL = 0.01
"""A group with a smaller part of the sum is not divided: its weights cannot matter."""


@dataclass(frozen=True)
class _Named(NamedTensor):
    name: str
    ne: tuple[int, ...] = ()


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

    def measure(exchanged: Collection[str]) -> float:
        nonlocal done
        kl = kl_of(frozenset(exchanged))
        done += 1
        on_progress(done, total)
        return kl

    def share(of: Sequence[str], layer: int, part: str) -> Share:
        return Share(tuple(of), layer, part, measure(of))

    whole = measure(names) if names else 0.0
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
    """Attention and feed-forward of each layer; what is in no layer is alone."""
    found: dict[tuple[int, str], list[str]] = {}
    for name in names:
        layer, role = _Named(name).layer, role_of(name)
        part = role
        if layer >= 0:
            part = "feed-forward" if "ffn" in role or "exp" in role else "attention"
        found.setdefault((layer, part), []).append(name)
    return found
