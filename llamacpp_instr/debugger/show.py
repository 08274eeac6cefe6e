"""Stops, tensors, guesses and attention as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.debugger.attention import AttentionWeights
from llamacpp_instr.debugger.comparison import Comparison
from llamacpp_instr.debugger.figures import figures_of, parse_slice
from llamacpp_instr.debugger.lens import Guess
from llamacpp_instr.debugger.stop import Stop

_FEW = 6  # values that are printed of a row
_SHADES = " ░▒▓█"
_MOST_CELLS = 64  # columns of a picture of attention

Text = Callable[[int], str]
"""the text of a token"""


def describe_stop(stop: Stop) -> str:
    """Where a compute waits and why."""
    node = stop.node
    place = f"layer {node.layer}, {node.block}" if node.layer >= 0 else node.block
    tokens = counted(stop.n_tokens, "token")
    where = f"step {stop.step}, {tokens}; op {node.index + 1} of {len(stop.graph)}; {place}"
    return "\n".join((stop.why, where, f"  {node}", f"  {node.purpose}"))


def describe_tensor(stop: Stop, name: str | None, part: str) -> str:
    """The figures of a tensor or of a slice of it, and the ends of its first and last rows."""
    values = stop.values(name)
    values = np.asarray(values[parse_slice(part, values.shape)])
    figures = figures_of(values)
    parts = [
        f"{field.name} {value:,}" if isinstance(value, int) else f"{field.name} {value:.6g}"
        for field in fields(figures)
        if (value := getattr(figures, field.name)) is not None
    ]
    shape = "×".join(str(n) for n in values.shape) or "one value"
    return "\n".join(
        (
            f"{name or stop.node.name}{part}  {shape}",
            "  " + "  ".join(parts),
            np.array2string(values, threshold=4 * _FEW, edgeitems=_FEW // 2, precision=5),
        )
    )


def describe_tokens(stop: Stop, text: Text) -> str:
    """The tokens of a compute, a line each: number, position, id, text."""
    tokens, positions = stop.ubatch.tokens, stop.ubatch.positions
    if tokens is None:
        return "this compute has embeddings instead of tokens"
    at = positions if positions is not None else range(len(tokens))
    return "\n".join(
        f"{number:4}  position {position}  {token:6}  {text(int(token))!r}"
        for number, (position, token) in enumerate(zip(at, tokens, strict=True))
    )


def probability_table(best: Sequence[tuple[int, float]], text: Text) -> str:
    """Tokens by probability, a line each."""
    return "\n".join(f"{share:7.2%}  {token:6}  {text(token)!r}" for token, share in best)


def lens_table(guesses: Sequence[Guess], text: Text) -> str:
    """The three most probable tokens after each layer."""
    lines = []
    for guess in guesses:
        best = "  ".join(f"{share:5.1%} {text(token)!r:12}" for token, share in guess.top(3))
        lines.append(f"layer {guess.layer:3}: {best}".rstrip())
    return "\n".join(lines)


def attention_table(seen: AttentionWeights, head: int | None) -> str:
    """Rows of attention as shades, from 0 to the row's own maximum: the tokens of one head, or the
    last token of every head."""
    heads = len(seen.weights)
    rows = seen.weights[:, -1] if head is None else seen.weights[_checked(head, heads)]
    used = int(np.flatnonzero(seen.weights.any(axis=(0, 1))).max(initial=0)) + 1
    first = max(0, used - _MOST_CELLS)
    lines = [
        f"layer {seen.layer}, cells {first} to {used - 1}"
        + (", computed from queries and keys" if seen.computed else "")
    ]
    for number, row in enumerate(rows):
        best = np.argsort(-row, kind="stable")[:3]
        most = ", ".join(f"{cell}: {row[cell]:.2f}" for cell in best)
        shades = "".join(_shade(value / max(row.max(), 1e-30)) for value in row[first:used])
        lines.append(f"{'head' if head is None else 'token'} {number:3} |{shades}| {most}")
    return "\n".join(lines)


def comparison_table(compared: Comparison, text: Text) -> str:
    """Both continuations token by token. As long as they had the same past: the largest difference
    of two logits, and the divergence of the probabilities."""
    lines = [f"{'':5}{'unchanged':>16}  {'changed':<16}  logits by  KL divergence, nats"]
    for step in compared.steps:
        before, after = (
            repr(text(token)) if token is not None else "" for token in (step.before, step.after)
        )
        difference = ""
        if step.same_past and step.largest is not None and step.divergence is not None:
            difference = f"{step.largest:9.3g}  {step.divergence:.3g}"
        lines.append(f"{step.number:4} {before:>16}  {after:<16}  {difference}".rstrip())
    return "\n".join(lines)


def _checked(head: int, heads: int) -> int:
    if not 0 <= head < heads:
        raise UsageError(f"there is no head {head}; this layer's are 0 to {heads - 1}")
    return head


def _shade(share: float) -> str:
    return _SHADES[min(int(share * len(_SHADES)), len(_SHADES) - 1)]
