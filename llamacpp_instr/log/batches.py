"""What a batch has of each sequence, and whether that is a prompt: a step with one is a prefill.

The log does not mark prompts. So the tokens of a sequence in a batch are of a prompt if

- they are the first of the sequence; a single one that has others before it is not, because the
  log then began in the middle of a request,
- they go back before the end of the last prompt, which a context shift moves,
- the mark of the sequence's request has ended,
- they are several and not all have an output; several that all have one are the draft of
  speculative decoding,
- or no token has been sampled since the previous prompt began, and they are not the draft of a
  draft model. In a log without tokens, where the application does its own sampling: if they are
  several, or the previous ones had no output, or filled a batch and did not all have an output.

Without positions, it is what the recorder concluded from the number of tokens.

Also which cells the tokens of a compute find in the caches of their context. A log records how many
cells a ubatch leaves in use, and the first positions of its sequences. Once a cache was empty, that
says how many cells each token sees; with one sequence also where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llamacpp_instr.log.graph.attention import Seen, Span, Ubatch
from llamacpp_instr.log.schema import Compute, Context, Kv, Model, StepBegin, Token


class Part(NamedTuple):
    """What one step does for one sequence."""

    seq: int
    pos: int
    tokens: int
    outputs: int
    prompt: bool
    """whether the tokens are of a prompt"""


@dataclass
class _Sequence:
    step: int
    """the latest that has tokens of it"""
    prompt_end: int
    """position after the last prompt token"""
    waits: bool
    """its prompt goes on, or its first token comes next"""
    unended: list[int] = field(default_factory=list)
    """when the first batches of the last two prompts began, in ns; those whose mark has ended are
    left out"""
    ended: bool = False
    """the mark of the current prompt's request has ended"""


class Batches:
    """Follows the batches of one context."""

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._sequences: dict[int, _Sequence] = {}
        self._samples = False
        """whether the log has tokens of the context"""
        self.verifies = False
        """whether another context drafts for it"""

    def parts(self, step: StepBegin) -> list[Part]:
        """What a batch has of each sequence; in logs without sequences, only if it has one."""
        found = step.sequences
        if not found and step.n_seqs == 1:
            found = [(0, step.pos, step.n_tokens, step.n_outputs)]
        return [self._part(step, *of) for of in found]

    def sampled(self, token: Token) -> None:
        """Follows a token. Without a sequence, it counts for all that the step has."""
        self._samples = True
        known = self._sequences
        for seq in known if token.seq < 0 else known.keys() & {token.seq}:
            if known[seq].step == token.step:
                known[seq].waits = False

    def request_ended(self, seq: int, begin: int) -> None:
        """The application's mark of a request, which began at `begin`, has ended: the next tokens
        of its sequence are a prompt, even a single one that finds all others in the cache.

        An application may end a mark late, after the next prompt of the sequence began. So a mark
        belongs to the first prompt that began after it and whose own mark has not ended; if that
        is not the current prompt, nothing else changes."""
        sequence = self._sequences.get(seq)
        if sequence is None:
            return
        prompts = sequence.unended
        first = next((i for i, began in enumerate(prompts) if began >= begin), len(prompts) - 1)
        if first == len(prompts) - 1:
            sequence.waits = sequence.ended = True
        del prompts[max(first, 0) : first + 1]

    def moved(self, kv: Kv) -> None:
        """Follows a context shift, which takes cells away and moves those behind to the front."""
        of = self._sequences.get(-1 if kv.seq is None else kv.seq)
        if of is not None and kv.op == "seq_add" and (kv.arg or 0) < 0:
            moves = max(of.prompt_end, kv.p0 or 0)
            of.prompt_end = min(of.prompt_end, moves + (kv.arg or 0))

    def _part(self, step: StepBegin, seq: int, pos: int, tokens: int, outputs: int) -> Part:
        sequence = self._sequences.get(seq)
        if step.kind == "encode" or pos < 0:
            prompt = step.kind == "encode" or step.phase == "prefill"
        elif sequence is None:
            prompt = tokens > 1 or pos == 0
        elif pos < sequence.prompt_end or tokens > max(outputs, 1):
            prompt = True
        else:
            draft = self.verifies and tokens > 1  # the last token of a prompt may come with it
            prompt = not draft and (sequence.waits or (tokens > 1 and not self._samples))
        is_full = outputs < tokens and step.n_tokens >= self._n_batch
        waits = prompt and (self._samples or not outputs or is_full)
        if sequence is None:
            sequence = _Sequence(step.step, pos, waits, [step.t] * prompt)
        elif prompt and (sequence.ended or not sequence.waits or pos < sequence.prompt_end):
            sequence.unended, sequence.ended = [*sequence.unended[-1:], step.t], False
        sequence.step, sequence.waits = step.step, waits
        if prompt:
            sequence.prompt_end = pos + tokens
        self._sequences[seq] = sequence
        return Part(seq, pos, tokens, outputs, prompt)


@dataclass
class _Cache:
    used: int = 0
    next: int | None = None
    """the position that follows, if one sequence has all positions before it; None if unknown"""
    in_order: bool = False
    """position i is in cell i"""
    lengths: dict[int, int] | None = None
    """the number of cells of each sequence, which has all positions before it; None if unknown"""
    applied: Kv | None = None
    """cells for a ubatch were taken, and its compute has not come yet"""

    def remove(self, kv: Kv) -> None:
        """Follows, in `lengths`, a change other than the taking of cells."""
        if kv.op == "seq_cp":
            self.lengths = None  # cells have several sequences
        if not kv.used and kv.op in ("seq_rm", "seq_keep", "clear"):
            self.lengths = {}
        if self.lengths is None:
            return
        if kv.op == "seq_rm" and (kv.p1 is None or kv.p1 < 0):
            left = max(kv.p0 or 0, 0)
            everyone = kv.seq is None or kv.seq < 0
            for seq, length in self.lengths.items():
                if everyone or seq == kv.seq:
                    self.lengths[seq] = min(length, left)
        elif kv.op == "seq_keep":
            self.lengths = {s: length for s, length in self.lengths.items() if s == kv.seq}
        self._check(kv.used)

    def add(self, parts: Sequence[tuple[int, int, int]], n: int, used: int) -> bool:
        """Follows a ubatch of `n` tokens with `parts`: sequence, first position and number of
        tokens of each. Returns whether each token sees as many cells as its position says."""
        if used == n:
            self.lengths = {}
        if self.lengths is None:
            return False
        for seq, first, tokens in parts:
            if self.lengths.get(seq, 0) != first:
                self.lengths = None
                return False
            self.lengths[seq] = first + tokens
        self._check(used)
        return self.lengths is not None

    def _check(self, used: int) -> None:
        """Forgets `lengths` if sequences share cells, or others have some."""
        if self.lengths is not None and sum(self.lengths.values()) != used:
            self.lengths = None


class Caches:
    """Follows the caches of one context. A cache is unknown until it is seen empty."""

    def __init__(self, context: Context, model: Model) -> None:
        self._context = context
        window = model.hparams.get("n_swa")
        self._window = window if isinstance(window, int) and window > 0 else 0
        # LLAMA_SWA_TYPE_CHUNKED and _SYMMETRIC: src/models/*.cpp
        self._uniform = model.arch not in ("llama4", "gemma-embedding", "modern-bert")
        self._caches: dict[int, _Cache] = {}
        self._step = -1
        self._computed = 0
        """tokens of the step in earlier computes"""

    def take(self, kv: Kv) -> None:
        """Follows a change of a cache."""
        if kv.kind != "kv":
            return
        cache = self._caches.setdefault(kv.cache, _Cache())
        if kv.op == "apply":
            cache.applied = kv
            return
        cache.remove(kv)
        removes = kv.op in ("seq_rm", "seq_keep", "clear")
        if cache.applied or not (removes and kv.used == cache.used):
            tail = kv.op == "seq_rm" and kv.p0 is not None and (kv.p1 is None or kv.p1 < 0)
            if removes and not kv.used:
                cache.next, cache.in_order = 0, True
            elif tail and cache.in_order and kv.used == kv.p0 and not cache.applied:
                cache.next = kv.p0
            else:
                cache.next, cache.in_order = None, False
        cache.used, cache.applied = kv.used, None

    def compute(self, compute: Compute, step: StepBegin | None) -> Ubatch:
        """What is known of the masks of a compute; `step` is the one that it belongs to."""
        if step is None or step.step != self._step:
            self._step, self._computed = -1 if step is None else step.step, 0
        n, first = compute.n_tokens, None
        if step is not None and step.n_seqs == 1:
            first = step.pos + self._computed if step.pos >= 0 else -1
        parts = [] if step is None else _parts(step, self._computed, n)
        self._computed += n
        seen = [self._seen(cache, n, first, parts) for _, cache in sorted(self._caches.items())]
        return Ubatch(
            n_threads=compute.n_threads,
            n_tokens=n,
            alone=(Span(0, n),) if step is not None and step.n_seqs == 1 else (),
            caches=tuple(of for of in seen if of is not None),
            causal=self._context.causal,
            window=self._window,
            uniform=self._uniform,
        )

    def _seen(
        self, cache: _Cache, n: int, first: int | None, parts: Sequence[tuple[int, int, int]]
    ) -> Seen | None:
        """What `n` tokens from position `first` on find; -1 if llama.cpp chose it, None if they are
        of several sequences, which `parts` then has if they are known."""
        kv, cache.applied = cache.applied, None
        if kv is None:
            return None
        known = cache.add(parts, n, kv.used)
        before, cache.used = cache.used, kv.used
        empty = kv.used == n
        if first == -1:
            first = 0 if empty else cache.next
        if first is not None and empty and first == 0:
            cache.next, cache.in_order = n, True
        elif first is not None and cache.next == first and 0 <= kv.used - before <= n:
            cache.next = first + n
            # else cells behind the window were taken again
            cache.in_order = cache.in_order and kv.used - before == n
        else:
            cache.next, cache.in_order = None, False
        # the length first: a damaged log may speak of more tokens than fit into memory
        if kv.cells is not None and (
            len(kv.cells) != n or kv.cells != list(range(kv.used - n, kv.used))
        ):
            cache.in_order = False
        if cache.next is not None:
            span = Span(cache.next - n, n)
        elif self._context.n_seq_max == 1 and first is not None and kv.used >= n:
            # cells were removed or moved, but all that are left come before these tokens
            span = Span(kv.used - n, n)
        elif known and parts:
            spans = tuple(Span(pos, tokens) for _, pos, tokens in parts)
            return Seen(kv.used, spans, size=kv.size)
        else:
            return Seen(kv.used, size=kv.size)
        return Seen(kv.used, (span,), cache.next is not None, cache.in_order, kv.size)


def _parts(step: StepBegin, before: int, n: int) -> list[tuple[int, int, int]]:
    """The sequence, first position and number of tokens of each sequence of a ubatch of `n` tokens
    of a step whose earlier ubatches had `before` tokens; empty if the log does not say."""
    found = [(seq, pos, tokens) for seq, pos, tokens, _ in step.sequences]
    if len(found) == 1 and before + n <= found[0][2]:
        ((seq, pos, _),) = found
        return [(seq, pos + before, n)] if pos >= 0 else []
    # a token may be of several sequences
    whole = n == step.n_tokens == sum(tokens for _, _, tokens in found)
    return found if whole and all(pos >= 0 for _, pos, _ in found) else []
