"""What clients ask of a server: the recorded requests, the same at another rate or from another
number of clients, or requests drawn from distributions.

Invariant: a text is a tuple of pieces. Two texts have in common the tokens of the equal pieces at
their beginning, so a simulated server finds in its slots what a real one finds there.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.tasks import read_toml
from llamacpp_instr.log.requests import Request as RecordedRequest

Text = tuple[tuple[int, int], ...]
"""pieces: what they are, and how many tokens they have"""


@dataclass(slots=True)
class Request:
    """What one client asks; times in ns."""

    arrival: int
    """if each request arrives at its time"""
    text: Text
    """of the prompt"""
    output: int
    """tokens that it gets, unless its slot's context ends first"""
    think: int = 0
    """from the end of the client's last request, if each client waits for its answer"""
    next: int = -1
    """the number of the request that goes on with its text, -1 for none"""
    goes_on: bool = False
    """whether it goes on with an earlier one"""

    @property
    def prompt(self) -> int:
        return sum(n for _, n in self.text)


@dataclass
class Workload:
    """Requests in the order of their arrival, or in the order in which clients take them."""

    requests: list[Request]
    clients: int = 0
    """that wait for their answers; 0: each request arrives at its time"""
    after: list[int] = field(default_factory=list)
    """of a recording with such clients: the request whose answer each came after, -1 for none"""
    joined: list[tuple[int, int]] = field(default_factory=list)
    """of a recording: the number of steps before each request's first, and its slot; empty if
    unknown"""
    joins: bool = False
    """whether a request waits for that step and takes that slot"""


def common(a: Text, b: Text) -> int:
    """The number of tokens that both texts begin with."""
    n = 0
    for (of_a, tokens_a), (of_b, tokens_b) in zip(a, b, strict=False):
        if of_a != of_b:
            break
        n += min(tokens_a, tokens_b)
        if tokens_a != tokens_b:
            break
    return n


def beginning(text: Text, tokens: int) -> Text:
    """The pieces of the first tokens."""
    found = []
    for what, n in text:
        if tokens <= 0:
            break
        found.append((what, min(n, tokens)))
        tokens -= n
    return tuple(found)


def answer_piece(number: int) -> int:
    """The piece that is the answer to the request of this number."""
    return -1 - number


# --- the recorded requests ---


def recorded_workload(requests: Sequence[RecordedRequest]) -> Workload:
    """The requests of a log, in the order of their arrival. Those without a token are left out."""
    kept = sorted((of for of in requests if of.token_times), key=lambda of: of.first)
    found: list[Request] = []
    whole: list[Text] = []
    in_slot: dict[int, int] = {}
    start = kept[0].first if kept else 0
    for i, of in enumerate(sorted(kept, key=lambda of: of.begin)):
        prompt = of.taken.prompt if of.taken else of.reused + of.prompt
        shared, parent = _shared(of, prompt, in_slot, whole)
        text = beginning(whole[parent], shared) if shared else ()
        if prompt > shared:
            text = (*text, (i, prompt - shared))
        output = len(of.token_times)
        found.append(Request(of.first - start, text, output))
        # a conversation: the prompt contains the answer to another
        goes_on = shared and any(what == answer_piece(parent) for what, _ in text)
        if goes_on and found[parent].next < 0:
            found[parent].next, found[i].goes_on = i, True
        whole.append((*text, (answer_piece(i), output)))
        in_slot[of.seq] = i
    _split_shared(found)
    order = sorted(range(len(found)), key=lambda i: found[i].arrival)
    place = {i: at for at, i in enumerate(order)}
    for of_found in found:
        of_found.next = place.get(of_found.next, -1)
    made = Workload([found[i] for i in order])
    _find_clients(made, [of.first for of in kept], [of.end for of in kept])
    if len(kept) == len(requests):
        first = min((of.first_step for of in kept), default=0)
        made.joined = [(of.first_step - first, of.seq) for of in kept]
    return made


def _split_shared(requests: Sequence[Request]) -> None:
    """Splits a piece in two if others have only the beginning of it."""
    longest: dict[int, int] = {}
    for number, of in enumerate(requests):
        for what, n in of.text:
            if what != number:
                longest[what] = max(longest.get(what, 0), n)
    for number, of in enumerate(requests):
        if (
            of.text
            and (last := of.text[-1])[0] == number
            and last[1] > longest.get(number, last[1])
        ):
            n = longest[number]
            rest = len(requests) + number, last[1] - n
            of.text = (*of.text[:-1], (number, n), rest)


def _shared(
    of: RecordedRequest, prompt: int, in_slot: dict[int, int], whole: Sequence[Text]
) -> tuple[int, int]:
    """How many tokens a prompt shares with the beginning of an earlier text, and which."""
    if of.taken is None:
        shared, other = of.reused, False
    else:
        shared = max(of.taken.cached, of.taken.here, of.taken.elsewhere)
        other = of.taken.elsewhere > max(of.taken.cached, of.taken.here)
    own = in_slot.get(of.seq, -1)
    lengths = {i: sum(n for _, n in whole[i]) for i in in_slot.values()}
    if own < 0 or other or lengths[own] < shared:
        own = max((i for i, n in lengths.items() if n >= shared), default=-1)
    if own < 0:
        return 0, -1
    return min(shared, prompt), own


STEADY = 0.8
"""share of the arrivals at which the usual number of clients wait, if each asks after its answer"""


def _find_clients(made: Workload, arrivals: Sequence[int], ends: Sequence[int]) -> None:
    """Sets the number of clients that waited for their answers, if there were any, and for each
    request the answer that it came after, and how long after it."""
    by_end = sorted(range(len(ends)), key=ends.__getitem__)
    ordered = [ends[i] for i in by_end]
    waiting = [i + 1 - bisect_left(ordered, t) for i, t in enumerate(arrivals)]
    n = max(waiting, key=waiting.count, default=0)
    steady = waiting[n : len(waiting) - n]
    if not steady or steady.count(n) < STEADY * len(steady):
        return
    made.clients, made.after = n, [-1] * n + by_end[: len(arrivals) - n]
    for i, (of, before) in enumerate(zip(made.requests, made.after, strict=True)):
        of.think = max(arrivals[i] - ends[before], 0) if before >= 0 else of.arrival


def as_recorded(of: Workload) -> Workload:
    """Each client asks what it asked in the recording, after the same pause; without clients that
    waited for their answers, each request arrives at its time. It joins the same step."""
    if not of.clients:
        return replace(of, joins=bool(of.joined))
    following = {before: i for i, before in enumerate(of.after)}
    requests = [
        replace(request, next=following.get(i, -1), goes_on=of.after[i] >= 0)
        for i, request in enumerate(of.requests)
    ]
    return replace(of, requests=requests, joins=bool(of.joined))


# --- other loads ---


def closed_loop(of: Workload, clients: int, n: int, seed: int) -> Workload:
    """Clients that each wait for their answer: at least `n` requests like those of `of`."""
    requests = repeated(of.requests, n, random.Random(seed))
    first = [request for request in requests if not request.goes_on][:clients]
    for request in first:
        request.think = 0
    return Workload(requests, clients)


def at_rate(of: Workload, rate: float, n: int, seed: int) -> Workload:
    """At least `n` requests like those of `of`, which arrive at random at this mean rate."""
    draw = random.Random(seed)
    requests = repeated(of.requests, n, draw)
    t = 0.0
    for request in requests:
        if not request.goes_on:
            t += draw.expovariate(rate) * 1e9
        request.arrival = round(t)
    return Workload(requests)


def scaled(of: Workload, prompt: float, answer: float = 1.0) -> Workload:
    """The same requests with longer or shorter prompts and answers. What several conversations
    begin with keeps its length."""
    uses = _uses(_conversations(of.requests), of.requests)

    def longer(request: Request) -> Request:
        text = tuple(
            (what, n if uses[what] > 1 else max(1, round(n * prompt))) for what, n in request.text
        )
        return replace(request, text=text, output=max(1, round(request.output * answer)))

    return replace(of, requests=[longer(request) for request in of.requests])


def _conversations(requests: Sequence[Request]) -> list[list[int]]:
    """The numbers of the requests of each conversation."""
    found = []
    for i, of in enumerate(requests):
        if not of.goes_on:
            found.append([i])
            while requests[found[-1][-1]].next >= 0:
                found[-1].append(requests[found[-1][-1]].next)
    return found


def _uses(conversations: Sequence[Sequence[int]], requests: Sequence[Request]) -> Counter[int]:
    """How many conversations have each piece."""
    uses: Counter[int] = Counter()
    for of in conversations:
        uses.update({what for i in of for what, _ in requests[i].text})
    return uses


def repeated(requests: Sequence[Request], n: int, draw: random.Random) -> list[Request]:
    """The requests in another order, repeated with other texts until there are `n`. What several
    conversations have in common stays the same."""
    chains = _conversations(requests)
    uses = _uses(chains, requests)
    fresh = 1 + max((abs(what) for what in uses), default=0) + len(requests)
    found: list[Request] = []
    while len(found) < n:
        draw.shuffle(chains)
        for chain in chains:
            names: dict[int, int] = {}
            for place, i in enumerate(chain):
                number = len(found)
                text = []
                for what, tokens in requests[i].text:
                    if what >= 0 and uses[what] < 2:
                        if what not in names:
                            names[what], fresh = fresh, fresh + 1
                        what = names[what]
                    text.append((names.get(what, what), tokens))
                names[answer_piece(i)] = answer_piece(number)
                last = place == len(chain) - 1
                found.append(
                    replace(
                        requests[i], text=tuple(text), next=-1 if last else number + 1,
                        goes_on=place > 0,
                    )
                )  # fmt: skip
            if len(found) >= n:
                break
    return found


# --- from a file ---


class Spread(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A distribution: between `least` and `most`, or around `mean`."""

    least: float | None = None
    most: float | None = None
    mean: float | None = None
    deviation: float | None = None


Amount: TypeAlias = float | list[float] | Spread


class _File(msgspec.Struct, forbid_unknown_fields=True):
    prompt: Amount
    answer: Amount
    shared: float = 0
    think: Amount = 0


def read_workload(path: str | Path, n: int = 1000, seed: int = 0) -> Workload:
    """`n` requests of the distributions in a TOML file: `prompt` and `answer` in tokens, `think` in
    seconds, and `shared` tokens that all prompts begin with. Raises `UsageError` if it is wrong."""
    file: _File = read_toml(path, _File)
    draw = random.Random(seed)
    prompt, answer, think = (
        _draws(path, key, getattr(file, key), draw) for key in ("prompt", "answer", "think")
    )
    found = []
    for i in range(n):
        tokens = max(1, round(prompt()))
        shared = min(round(file.shared), tokens)
        text = tuple(of for of in ((0, shared), (i + 1, tokens - shared)) if of[1] > 0)
        wait = max(0, round(think() * 1e9))
        found.append(Request(0, text, max(1, round(answer())), wait))
    return Workload(found)


def _draws(path: str | Path, key: str, value: Amount, draw: random.Random) -> Callable[[], float]:
    of = Spread(least=value, most=value) if isinstance(value, int | float) else value
    if isinstance(of, list) and of and min(of) >= 0:
        choices = of
        return lambda: draw.choice(choices)
    if isinstance(of, Spread):
        match of.least, of.most, of.mean, of.deviation:
            case (float() | int()) as least, (float() | int()) as most, None, None:
                if 0 <= least <= most:
                    return lambda: draw.uniform(least, most)
            case None, None, (float() | int()) as mean, (float() | int()) as deviation:
                if mean >= 0 and deviation >= 0:
                    return lambda: draw.gauss(mean, deviation)
    raise UsageError(
        f"{path}: {key}: give a number, a list of numbers, {{ least = 1, most = 9 }} or"
        " { mean = 200, deviation = 50 }, none below 0"
    )
