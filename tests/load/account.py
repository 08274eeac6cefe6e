"""Compares a recording of a server with the answers to its clients: no step is extra or missing.

In the log a request is a prefill, then tokens and the decodes between them. The log does not name
the request, so its prompt length, its number of sampled tokens and their text are compared with
the server's answer and its `usage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llamacpp_instr.log import schema
from llamacpp_instr.log.batches import Batches
from llamacpp_instr.log.reader import read_events
from tests.conftest import log_parts

END_OF_TEXT = 2
"""the demo model's token; not part of an answer or of `completion_tokens`"""


@dataclass
class Generation:
    """The work of the server for one request."""

    prompt_tokens: int
    """including those whose cells were still in the cache"""
    ids: list[int] = field(default_factory=list)
    written: bytes = b""
    decodes: int = 0

    def key(self) -> tuple[int, int, str, bool]:
        """Tokens of the prompt, tokens of the answer, its text, whether the model ended it."""
        ended = self.ids[-1:] == [END_OF_TEXT]
        return self.prompt_tokens, len(self.ids) - ended, self.text(), ended

    def text(self) -> str:
        return self.written.decode(errors="ignore")


@dataclass
class Recording:
    """The content of all parts of a log together."""

    parts: list[Path]
    n_bytes: list[int] = field(default_factory=list)
    """of each part"""
    events: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    evaluated: int = 0
    """tokens that steps evaluated"""
    kept: int = 0
    """tokens of prompts that were not evaluated again, because the cache still had them"""
    sampled: int = 0
    dropped: int = 0
    """events and ops that are missing, by the recorder's own count"""
    cut: int = 0
    """generations that a rotation split into two parts"""
    wrong: list[str] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)


def read_recording(log: Path) -> Recording:
    """Read all parts; errors are collected in `wrong`."""
    found = Recording(log_parts(log))
    reader = _Reader(found)
    for number, path in enumerate(found.parts, 1):
        found.n_bytes.append(path.stat().st_size)
        reader.part(number, path)
    return found


class _Reader:
    def __init__(self, into: Recording) -> None:
        self.into = into
        self.session = ""
        self.step = 0  # the next one's number
        self.position = 0  # the next decode's
        self.batches: dict[int, Batches] = {}  # of each context

    def part(self, number: int, path: Path) -> None:
        log = read_events(path)
        counted: Counter[str] = Counter()
        end = None
        cut = bool(self.into.generations)
        for _, event in log:
            name = schema.event_name(event)
            if isinstance(event, schema.SessionEnd):
                end = event
                continue
            counted[name] += 1
            if isinstance(event, schema.SessionStart):
                self._expect(path, "the part's number", event.part, number)
                self.session = self.session or event.id
                self._expect(path, "the session", event.id, self.session)
            elif isinstance(event, schema.Context):
                self.batches.setdefault(event.ctx, Batches(event.n_batch))
            elif isinstance(event, schema.StepBegin):
                prompt = any(part.prompt for part in self.batches[event.ctx].parts(event))
                if cut and not prompt:
                    self.into.cut += 1
                cut = False
                self._begin(path, event, prompt)
            elif isinstance(event, schema.StepEnd):
                self._expect(path, f"the status of step {event.step}", event.status, 0)
            elif isinstance(event, schema.Token):
                self.batches[event.ctx].sampled(event)
                self._token(event)
        self.into.events += counted
        if end is None or log.end is None:
            self.into.wrong.append(f"{path.name}: it is not closed")
            return
        self.into.dropped += end.dropped + end.dropped_ops
        last = number == len(self.into.parts)
        self._expect(path, "the reason of the end", end.reason, "exit" if last else "rotated")
        self._expect(path, "lines", dict(counted), end.events)
        self._expect(path, "what was dropped", end.dropped + end.dropped_ops, 0)
        self._expect(path, "steps that ended", counted["step_end"], counted["step_begin"])

    def _begin(self, path: Path, event: schema.StepBegin, prompt: bool) -> None:
        self._expect(path, "the step's number", event.step, self.step)
        self.step = event.step + 1
        self.into.steps += 1
        self.into.evaluated += event.n_tokens
        if prompt:
            self.into.kept += event.pos
            self.into.generations.append(Generation(event.pos + event.n_tokens))
        else:
            self._expect(path, f"the position of step {event.step}", event.pos, self.position)
            self.into.generations[-1].decodes += 1
        self.position = event.pos + event.n_tokens

    def _token(self, event: schema.Token) -> None:
        self.into.sampled += 1
        generation = self.into.generations[-1]
        generation.ids.append(event.id)
        if event.id != END_OF_TEXT:
            text = event.text.encode() if event.hex is None else bytes.fromhex(event.hex)
            generation.written += text

    def _expect(self, path: Path, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.into.wrong.append(f"{path.name}: {what} is {found}, not {expected}")


@dataclass(frozen=True)
class Outcome:
    """What one client knows about one answered request."""

    prompt_tokens: int
    completion_tokens: int
    text: str
    ended: bool
    """by the model, not by the limit"""
    left: bool = False
    """the client hung up; `text` is then the answer that it would have got"""
    seen: str = ""
    """the part that it had read by then"""

    def key(self) -> tuple[int, int, str, bool]:
        return self.prompt_tokens, self.completion_tokens, self.text, self.ended


@dataclass
class Matched:
    """The generations of a recording, matched with the answers to clients."""

    wrong: list[str]
    """generations and answers without a counterpart, and differences"""
    by_usage: int
    """sampled tokens of complete answers: the server's `usage`, plus one for each end token"""
    left: list[Generation]
    """generations for clients that hung up"""


def match_answers(recording: Recording, outcomes: Counter[Outcome]) -> Matched:
    """Find a generation for every answer, and an answer or a client that left for every
    generation."""
    whole = Counter({t.key(): n for t, n in outcomes.items() if not t.left})
    recorded = Counter(g.key() for g in recording.generations)
    wrong = [f"answered {n} times, not recorded: {key}" for key, n in (whole - recorded).items()]
    matched = Matched(wrong, sum(n * (key[1] + key[3]) for key, n in whole.items()), [])
    # the rest must belong to clients that hung up, as far as the server got
    left = [t for t, n in outcomes.items() if t.left for _ in range(n)]
    for generation in _among(recording.generations, recorded - whole):
        for candidate in left:
            if _is_beginning_of(generation, candidate):
                left.remove(candidate)
                matched.left.append(generation)
                break
        else:
            wrong.append(f"recorded, nobody was answered: {generation.key()}")
    wrong += [f"started for a client that hung up, not recorded: {t.key()}" for t in left]
    sampled = recording.sampled - sum(len(generation.ids) for generation in matched.left)
    if sampled != matched.by_usage:
        wrong.append(f"{sampled} tokens were sampled for answers, by usage {matched.by_usage}")
    for generation in recording.generations:
        # the last token is sampled and not evaluated; an embedding samples none
        if generation.decodes != max(0, len(generation.ids) - 1):
            wrong.append(f"{generation.decodes} decodes for {len(generation.ids)} tokens")
    return matched


def _among(
    generations: list[Generation], keys: Counter[tuple[int, int, str, bool]]
) -> Iterator[Generation]:
    keys = Counter(keys)
    for generation in generations:
        if keys[generation.key()] > 0:
            keys[generation.key()] -= 1
            yield generation


def _is_beginning_of(generation: Generation, outcome: Outcome) -> bool:
    return (
        generation.prompt_tokens == outcome.prompt_tokens
        and outcome.text.startswith(generation.text())
        and generation.text().startswith(outcome.seen)
    )
