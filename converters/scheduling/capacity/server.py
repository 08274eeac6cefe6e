"""llama-server, simulated: its queue, its slots, and what it puts into each batch.

The rules are those of the pinned llama.cpp, each named with its place in tools/server:

- Requests wait in order; one that ends lets the first in, before new ones: server-queue.cpp:90.
- A request that arrives during a step is seen after it: server-context.cpp:2358.
- It gets the free slot that has most of its prompt, if that is more than a tenth of it, else the
  one that was used least recently: server-context.cpp:1540, 1589.
- What a slot loses is copied to RAM, and what fits better comes back: server-context.cpp:1624,
  server-task.cpp:1711, 1793. A slot that takes a request copies the idle ones: 2417.
- A slot keeps what the prompt begins with; at least one token is computed: 3200, 3384.
- A batch has one token of each slot that generates, then prompts as long as there is room, both in
  the order of slots: 2891, 2998, 3014.
- An answer ends where its slot's context does: 1871.
- `batches` says how llama.cpp divides a batch.

Invariant: steps follow each other. Between two events, which are an arrival that finds a free slot
and the end of an answer, all steps are alike except for the cells that they read, so they are
advanced at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.scheduling.capacity.batches import split
from llamacpp_instr.converters.scheduling.capacity.copies import Copies
from llamacpp_instr.converters.scheduling.capacity.step_times import MOST_RUN, StepTimes
from llamacpp_instr.converters.scheduling.capacity.workload import (
    Request,
    Text,
    Workload,
    answer_piece,
    common,
)
from llamacpp_instr.log.requests import server_context
from llamacpp_instr.log.session import Session

Int64 = NDArray[np.int64]

SIMILAR = 0.1
"""share of a prompt that a slot must have to be chosen for it: common/common.h:697"""
KEPT = 0.5
"""share of what a slot has; if less stays, it is copied to RAM first: server-context.cpp:1582"""
WINDOW = 256
"""cells of a cache that a graph sees, in multiples of it: src/llama-kv-cache.cpp:1265"""


@dataclass(frozen=True)
class Settings:
    """The settings of a server that matter here."""

    slots: int
    ctx: int
    """cells of all slots"""
    batch: int = 2048
    ubatch: int = 512
    unified: bool = False
    """whether the slots share their cells"""
    threads: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    drafts: bool = False
    cache_ram: int = 8192 << 20
    """bytes of the copies in RAM"""

    @property
    def slot_ctx(self) -> int:
        """Cells of one slot."""
        if self.unified:
            return self.ctx
        return -(-(self.ctx // self.slots) // WINDOW) * WINDOW  # src/llama-context.cpp, n_ctx_seq


def settings_of(session: Session) -> Settings:
    """The settings of the recorded server. Raises UsageError if the log has no context."""
    of = server_context(session.contexts.values())
    if of is None:
        raise UsageError(f"{session.path}: no requests; record a llama-server that serves some")
    return Settings(
        of.n_seq_max, of.n_ctx, of.n_batch, of.n_ubatch, of.kv_unified, of.n_threads, of.type_k,
        of.type_v,
    )  # fmt: skip


@dataclass
class Outcome:
    """What happened to each request, times in ns; and what the server did."""

    arrival: Int64
    begin: Int64
    """when a slot took it"""
    first: Int64
    """its first token"""
    end: Int64
    slot: Int64
    cached: Int64
    computed: Int64
    output: Int64
    """tokens; 0 for a request that does not fit into a slot"""
    steps: int = 0
    largest: int = 0
    """the most tokens of a step"""
    prompt_ns: float = 0.0
    """of steps with a part of a prompt"""
    decode_ns: float = 0.0
    between_ns: float = 0.0
    """in which the server worked between steps"""
    unmeasured_ns: float = 0.0
    """of steps unlike any recorded one"""
    attention_ns: float = 0.0
    """the part of steps that cells took"""
    cells_ns: float = 0.0
    """the part of it in steps without a prompt"""
    ubatches: int = 0
    """of steps without a prompt"""
    slot_ns: float = 0.0
    """in which slots had a request, summed over all slots"""

    @property
    def took(self) -> int:
        """From the first arrival to the last end."""
        return int(self.end.max() - self.arrival.min()) if len(self.end) else 0


@dataclass
class _Slot:
    id: int
    text: Text = ()
    tokens: int = 0
    """in the cache, of a slot that generates: at `since`"""
    used: int = -1
    """when it was released, µs"""
    request: int = -1
    todo: int = 0
    """tokens of the prompt that are not computed yet"""
    since: int = 0
    """the step that `tokens` counts from"""
    last: int = 0
    """the step of its last token"""
    taken: float = 0.0


class Server:
    """One simulation."""

    def __init__(
        self, workload: Workload, settings: Settings, times: StepTimes, seed: int = 0
    ) -> None:
        n = len(workload.requests)
        self._requests, self._settings, self._times = workload.requests, settings, times
        self._clients = workload.clients
        joined = [(step, i, slot) for i, (step, slot) in enumerate(workload.joined)]
        self._joins = sorted(joined, reverse=True) if workload.joins else []
        self._slots = [_Slot(i) for i in range(settings.slots)]
        self._noise = times.noise(seed)
        self._random = Random(seed)
        self._drafts = times.drafts if settings.drafts else []
        self._copies = Copies(times.bytes_of_token, settings.cache_ram)
        self._now, self._step = 0.0, 0
        self._ready: deque[int] = deque()
        self._deferred: deque[int] = deque()
        self._prompting: list[_Slot] = []
        self._generating: list[_Slot] = []
        self._idle = list(self._slots)
        self._shape: object = None
        """of the last ubatch, whose graph can be used again"""
        self._heads = iter(i for i, of in enumerate(self._requests) if not of.goes_on)
        self._done = 0
        columns = ("arrival", "begin", "first", "end", "slot", "cached", "computed", "output")
        self._of = {name: [0] * n for name in columns}
        none = np.zeros(0, np.int64)
        self.outcome = Outcome(none, none, none, none, none, none, none, none)
        if self._clients:
            first = [i for _, i in zip(range(self._clients), self._heads, strict=False)]
            self._arrivals = [(float(self._requests[i].think), i) for i in first]
        else:
            self._arrivals = [
                (float(of.arrival), i) for i, of in enumerate(self._requests) if not of.goes_on
            ]
        heapify(self._arrivals)
        self._runs: dict[tuple[int, ...], tuple[float, float, bool, object, int]] = {}

    def run(self, on_progress: OnProgress | None = None) -> Outcome:
        """Simulates all requests, until the last has ended."""
        arrivals, ready, total = self._arrivals, self._ready, len(self._requests)
        shown = 0
        while True:
            while arrivals and arrivals[0][0] <= self._now:
                when, i = heappop(arrivals)
                self._of["arrival"][i] = round(when)
                ready.append(i)
            if self._joins:
                self._join()
            while ready and not self._joins:
                i = ready.popleft()
                if self._idle:
                    self._launch(i)
                else:
                    self._deferred.append(i)
            if self._prompting or (self._generating and self._drafts):
                self._mixed_step()
            elif self._generating:
                self._steps()
            elif arrivals:
                self._now = arrivals[0][0] + self._times.wake_ns
                when, i = heappop(arrivals)
                self._of["arrival"][i] = round(when)
                ready.append(i)
            else:
                break
            if on_progress is not None and self._done - shown >= 1000:
                shown = self._done
                on_progress(self._done, total)
        for name, column in self._of.items():
            setattr(self.outcome, name, np.array(column, np.int64))
        self.outcome.steps = self._step
        return self.outcome

    # --- the queue ---

    def _join(self) -> None:
        """Launches the requests that join this step in the recording, each once it has arrived."""
        nothing = not (self._prompting or self._generating)
        while self._joins and (self._joins[-1][0] <= self._step or nothing):
            _, i, number = self._joins[-1]
            slot = next((of for of in self._idle if of.id == number), None)
            if slot is None:
                return
            if i in self._ready:
                self._ready.remove(i)
            elif i in self._deferred:
                self._deferred.remove(i)
            else:
                coming = next((of for of in self._arrivals if of[1] == i), None)
                if coming is None:
                    return  # its client waits for an answer
                self._arrivals.remove(coming)
                heapify(self._arrivals)
                self._of["arrival"][i] = round(coming[0])
                self._now = max(self._now, coming[0])
            self._joins.pop()
            self._launch(i, slot)
            nothing = False

    def _launch(self, i: int, wanted: _Slot | None = None) -> None:
        of, slot = self._requests[i], self._choose(self._requests[i], wanted)
        prompt = of.prompt
        self._of["begin"][i], self._of["slot"][i] = round(self._now), slot.id
        if prompt >= self._settings.slot_ctx:  # server-context.cpp:3183
            self._of["first"][i] = self._of["end"][i] = round(self._now)
            self._after(i, 0)
            return
        cached = min(common(slot.text, of.text), prompt - 1)
        self._of["cached"][i], self._of["computed"][i] = cached, prompt - cached
        slot.text, slot.tokens, slot.todo, slot.request = of.text, cached, prompt - cached, i
        slot.taken = self._now
        self._idle.remove(slot)
        self._prompting.append(slot)
        self._prompting.sort(key=_id)
        self._now += self._times.launch_ns
        self.outcome.between_ns += self._times.launch_ns
        if not self._settings.cache_ram:
            return
        for other in self._idle:  # server-context.cpp:2417
            if other.tokens:
                self._save(other)
                if self._settings.unified:
                    other.text, other.tokens = (), 0

    def _choose(self, of: Request, wanted: _Slot | None) -> _Slot:
        """The slot for a request, with what it then has; the wanted one if there is one."""
        best, most, n = None, 0.0, of.prompt
        for slot in self._idle if wanted is None else (wanted,):
            if slot.tokens:
                similar = common(slot.text, of.text) / n
                if similar > most and similar > SIMILAR:
                    best, most = slot, similar
        loses = best is None or most * n / best.tokens < KEPT
        if best is None:
            best, last = wanted, -1
            for slot in self._idle:  # the last of those that are equal
                if best is None or (wanted is None and slot.used <= last):
                    best, last = slot, slot.used
        assert best is not None
        if loses and self._settings.cache_ram:
            self._save(best)
            copy = self._copies.take(of.text, best.text, best.tokens)
            if copy is not None:
                best.text, best.tokens = copy
                self._now += self._times.copy_ns * best.tokens
        return best

    def _save(self, slot: _Slot) -> None:
        if slot.tokens and self._copies.save(slot.text, slot.tokens):
            self._now += self._times.copy_ns * slot.tokens
            self.outcome.between_ns += self._times.copy_ns * slot.tokens

    def _after(self, i: int, output: int) -> None:
        """A request has ended: its client asks again, and the next in the queue gets its turn."""
        self._of["output"][i] = output
        self._done += 1
        of = self._requests[i]
        if self._clients or of.next >= 0:
            following = of.next if of.next >= 0 else next(self._heads, -1)
            if following >= 0:
                when = self._of["end"][i] + self._requests[following].think
                heappush(self._arrivals, (float(when), following))
        if self._deferred:  # server-queue.cpp:90
            self._ready.appendleft(self._deferred.popleft())

    def _release(self, slot: _Slot, end: float, output: int) -> None:
        i = slot.request
        self._of["end"][i] = round(end)
        slot.used, slot.request = int(end / 1000), -1
        slot.text = (*slot.text, (answer_piece(i), output - 1)) if output > 1 else slot.text
        self.outcome.slot_ns += end - slot.taken
        self._idle.append(slot)
        self._idle.sort(key=_id)
        self._after(i, output)

    # --- steps ---

    def _mixed_step(self) -> None:
        """A step with prompts, and the slots that generate, each with its draft."""
        settings, times = self._settings, self._times
        slots, drafts = list(self._generating), self._draft()
        generating = len(slots)
        cells = [slot.tokens + self._step - slot.since for slot in slots]
        parts = [(slot.id, 1 + n) for slot, (n, _) in zip(slots, drafts, strict=True)]
        room = settings.batch - sum(n for _, n in parts)
        for slot in self._prompting:
            if room <= 0:
                break
            n = min(slot.todo, room)
            parts.append((slot.id, n))
            slots.append(slot)
            cells.append(slot.tokens)
            room -= n
        left = [n for _, n in parts]
        ns = attention = unmeasured = 0.0
        for ubatch in split(parts, settings.ubatch, settings.unified):
            tokens = outputs = 0
            work = 0.0
            for i, n in ubatch:
                work += n * cells[i] + n * (n + 1) / 2
                cells[i] += n
                left[i] -= n
                tokens += n
                outputs += n if i < generating else not left[i] and slots[i].todo == parts[i][1]
            shape = tokens, outputs, len(ubatch)
            took = times.ubatch(tokens, outputs)
            if shape != self._shape:
                took += times.rebuild_ns
                self._shape = shape
            attention += (times.cell_ns if outputs == tokens else times.prompt_cell_ns) * work
            ns += took
            if not times.is_measured(tokens, outputs):
                unmeasured += took
        n = sum(n for _, n in parts)
        ns = (ns + attention) * self._noise.prompt() + times.step_ns
        if self._drafts:
            ns += times.drafting([n for n, _ in drafts], n)
        out = self.outcome
        if self._prompting:
            out.prompt_ns += ns
        else:
            out.decode_ns += ns
            out.cells_ns += attention
        out.attention_ns += attention
        out.unmeasured_ns += unmeasured
        out.largest = max(out.largest, n)
        self._step += 1
        for slot, (_, accepted) in zip(slots, drafts, strict=False):
            # the step gives more tokens, so the last comes nearer
            slot.tokens += accepted
            slot.last -= accepted
            self._now += times.token_ns * accepted
        done = [slot for slot, (_, n) in zip(slots, parts, strict=True)
                if slot.todo == n or not slot.todo]  # fmt: skip
        for slot, (_, n) in zip(slots[generating:], parts[generating:], strict=True):
            slot.todo -= n
            slot.tokens += n
        self._sample(ns, sorted(done, key=_id))

    def _draft(self) -> list[tuple[int, int]]:
        """For each slot that generates: tokens of its draft, and how many of them are accepted."""
        found = []
        for slot in self._generating:
            drafted, accepted = self._random.choice(self._drafts) if self._drafts else (0, 0)
            most = slot.last - self._step - 1  # server-context.cpp:463
            found.append((min(drafted, most), min(accepted, most)))
        return found

    def _sample(self, ns: float, sampled: list[_Slot]) -> None:
        """A step of `ns` has ended; these slots get a token each, in order."""
        times, end = self._times, self._now + ns
        ended = []
        for slot in sampled:
            end += times.token_ns
            if slot.last <= 0:  # its first token
                i = slot.request
                self._of["first"][i] = round(end)
                self._prompting.remove(slot)
                self._generating.append(slot)
                slot.since = self._step
                output = min(
                    self._requests[i].output, self._settings.slot_ctx - self._requests[i].prompt
                )
                slot.last = self._step + output - 1
            if slot.last == self._step:
                ended.append((slot, end + times.end_ns))
                end += times.end_ns
        self._generating.sort(key=_id)
        self.outcome.between_ns += end + times.between_ns - self._now - ns
        self._now = end + times.between_ns
        for slot, when in ended:
            self._end(slot, when)

    def _end(self, slot: _Slot, when: float) -> None:
        self._generating.remove(slot)
        slot.tokens += self._step - slot.since
        request = self._requests[slot.request]
        output = min(request.output, self._settings.slot_ctx - request.prompt)
        slot.last = 0
        self._release(slot, when, output)

    def _steps(self) -> None:
        """Advances by all the steps without a prompt that are alike."""
        generating, times = self._generating, self._times
        n = len(generating)
        key = tuple([slot.id for slot in generating])
        if (known := self._runs.get(key)) is None:
            known = self._runs[key] = self._decode(key)
        fixed, again, measured, shape, n_ubatches = known
        k = min([slot.last for slot in generating]) - self._step
        step = self._step
        cells = sum([slot.tokens + step - slot.since for slot in generating]) + n
        slope = times.cell_ns
        first = 0.0
        if shape != self._shape:
            first = times.rebuild_ns
            self._shape = shape
        each = fixed + again
        beside = times.between_ns + n * times.token_ns + times.step_ns
        k = min(k, MOST_RUN)
        if self._joins:
            k = max(min(k, self._joins[-1][0] - step), 1)
        sums, at = self._noise.take(k)
        if self._idle and self._arrivals:
            # until an arrival that finds a free slot
            gap = self._arrivals[0][0] - self._now - first
            low, high = 1, k
            while low < high:
                k = (low + high) // 2
                ns = k * (each + beside) + slope * (k * cells + n * (k * (k - 1) // 2))
                if ns + (sums[at + k] - sums[at]) * each >= gap:
                    high = k
                else:
                    low = k + 1
            k = low
        self._noise.at = at + k
        work = slope * (k * cells + n * (k * (k - 1) // 2))
        ns = each * k + work + (sums[at + k] - sums[at]) * each + first + times.step_ns * k
        beside -= times.step_ns
        out = self.outcome
        out.decode_ns += ns
        out.attention_ns += work
        out.cells_ns += work
        out.ubatches += k * n_ubatches
        if not measured:
            out.unmeasured_ns += fixed * k
        if n > out.largest:
            out.largest = n
        self._step += k
        self._now += ns + (k - 1) * beside
        out.between_ns += (k - 1) * beside
        # the last of them, whose tokens may be the last of answers
        end, ended = self._now, []
        for slot in generating:
            end += times.token_ns
            if slot.last == self._step:
                end += times.end_ns
                ended.append((slot, end))
        out.between_ns += end + times.between_ns - self._now
        self._now = end + times.between_ns
        for slot, when in ended:
            self._end(slot, when)

    def _decode(self, key: tuple[int, ...]) -> tuple[float, float, bool, object, int]:
        """For a step in which these slots generate: the time of its ubatches and of graphs that are
        rebuilt in every step, whether such ubatches were recorded, the last one's shape, and their
        number."""
        times, settings = self._times, self._settings
        ns, measured, shapes = 0.0, True, []
        for ubatch in split([(i, 1) for i in key], settings.ubatch, settings.unified):
            n = len(ubatch)
            ns += times.ubatch(n, n)
            measured &= times.is_measured(n, n)
            shapes.append((n, n, n))
        again = sum(a != b for a, b in zip(shapes, [*shapes[1:], shapes[0]], strict=True))
        return ns, again * times.rebuild_ns, measured, shapes[-1], len(shapes)


def _id(slot: _Slot) -> int:
    return slot.id


def simulate(
    workload: Workload,
    settings: Settings,
    times: StepTimes,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """What happens to the requests on a server with these settings and step times. The same seed
    gives the same outcome."""
    return Server(workload, settings, times, seed).run(on_progress)
