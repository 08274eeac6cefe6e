"""What a batch has of each sequence, and whether that is a prompt: a step with one is a prefill.

The log does not name prompts. So the tokens of a sequence in a batch are of a prompt if

- they are the first of the sequence; a single one that has others before it is not, because the
  log then began in the middle of a request,
- they go back before the end of the last prompt, which a context shift moves,
- they are several and not all have an output; several that all have one are the draft of
  speculative decoding,
- or no token was sampled since the prompt before them began. Without tokens, which the application
  then samples by itself: if they are several, or those before had no output, or filled a batch
  and had not all an output.

Without positions it is what the recorder made of the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamacpp_instr.log.schema import Kv, StepBegin, Token


@dataclass(frozen=True)
class Part:
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


class Batches:
    """Follows the batches of one context."""

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._sequences: dict[int, _Sequence] = {}
        self._samples = False
        """whether the log has tokens of the context"""

    def parts(self, step: StepBegin) -> list[Part]:
        """What the batch of the next step has of each sequence. A log without sequences
        has this only for batches with one."""
        found = step.sequences
        if not found and step.n_seqs == 1:
            found = [(0, step.pos, step.n_tokens, step.n_outputs)]
        return [self._part(step, *of) for of in found]

    def sampled(self, token: Token) -> None:
        """Follows a token. Without a sequence it is of all that the step has."""
        self._samples = True
        known = self._sequences
        for seq in known if token.seq < 0 else known.keys() & {token.seq}:
            if known[seq].step == token.step:
                known[seq].waits = False

    def moved(self, kv: Kv) -> None:
        """Follows a context shift, which takes cells away and moves those behind to the front."""
        of = self._sequences.get(-1 if kv.seq is None else kv.seq)
        if of is not None and kv.op == "seq_add" and (kv.arg or 0) < 0:
            moves = max(of.prompt_end, kv.p0 or 0)
            of.prompt_end = min(of.prompt_end, moves + (kv.arg or 0))

    def _part(self, step: StepBegin, seq: int, pos: int, tokens: int, outputs: int) -> Part:
        of = self._sequences.get(seq)
        if step.kind == "encode" or pos < 0:
            prompt = step.kind == "encode" or step.phase == "prefill"
        elif of is None:
            prompt = tokens > 1 or pos == 0
        elif pos < of.prompt_end or tokens > max(outputs, 1):
            prompt = True
        else:
            prompt = of.waits or (tokens > 1 and not self._samples)
        end = pos + tokens * prompt if prompt or of is None else of.prompt_end
        part = not outputs or (outputs < tokens and step.n_tokens >= self._n_batch)
        waits = prompt and (self._samples or part)
        self._sequences[seq] = _Sequence(step.step, end, waits)
        return Part(seq, pos, tokens, outputs, prompt)
