"""A server with continuous batching, recorded, and clients whose own clocks are the truth.

    python -m tests.kit.batch_server MODEL LOG

Every client is a thread that sends requests, one after the other, and notes when it sent each and
when it got each token. A loop in the main thread serves all of them in one context, whose sequences
are its slots. A prompt reuses the part that its slot already has. Prints what the clients saw, as
JSON.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import llamacpp_instr
from llamacpp_instr.recording.session import Recording
from tests.kit.decoder import Decoder

CLIENTS, SLOTS = 8, 4
REQUESTS = 3
"""of each client"""
MOST_TOKENS = 40


@dataclass
class Call:
    """One request as its client sees it; times in ns of CLOCK_MONOTONIC."""

    client: int
    prompt: list[int]
    n_tokens: int
    slot: int = -1
    reused: int = 0
    sent: int = 0
    pushed: list[int] = field(default_factory=list)
    """when the server had each token"""
    got: list[int] = field(default_factory=list)
    """when the client had each token"""
    done: int = 0
    tokens: queue.Queue[int] = field(default_factory=queue.Queue)

    def seen(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {
            "client": self.client, "slot": self.slot, "n_prompt": len(self.prompt),
            "reused": self.reused, "n_tokens": self.n_tokens, "sent": self.sent,
            "pushed": self.pushed, "got": self.got, "done": self.done,
        }  # fmt: skip


class Slot:
    """A sequence of the context."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.cells: list[int] = []
        """the tokens in the cache"""
        self.call: Call | None = None
        self.waiting: list[int] = []
        """tokens that are not computed"""


class Server(Decoder):
    def __init__(self, model: str) -> None:
        super().__init__(model, threads=2, n_ctx=1024, n_seq_max=SLOTS)
        self.slots = [Slot(seq) for seq in range(SLOTS)]
        self.calls: queue.Queue[Call] = queue.Queue()

    def serve(self, n_calls: int) -> None:
        """Serve that many calls."""
        left = n_calls
        while left:
            self._accept()
            if not any(slot.call for slot in self.slots):
                self._start(self.slots[0], self.calls.get())
            outputs = self.decode({slot.seq: slot.waiting for slot in self.slots if slot.waiting})
            for seq, output in outputs.items():
                left -= self._sample(self.slots[seq], output)

    def _accept(self) -> None:
        for slot in self.slots:
            if slot.call is None and not self.calls.empty():
                self._start(slot, self.calls.get())

    def _start(self, slot: Slot, call: Call) -> None:
        same = 0
        while same < min(len(slot.cells), len(call.prompt) - 1):
            if slot.cells[same] != call.prompt[same]:
                break
            same += 1
        self.cut(slot.seq, same)
        slot.cells = slot.cells[:same]
        slot.waiting = call.prompt[same:]
        slot.call, call.slot, call.reused = call, slot.seq, same

    def _sample(self, slot: Slot, output: int) -> bool:
        """Whether the call is done."""
        call = slot.call
        assert call is not None
        slot.cells += slot.waiting
        token = self.sample(output)
        call.pushed.append(time.monotonic_ns())
        done = len(call.pushed) == call.n_tokens
        slot.waiting = [] if done else [token]
        if done:
            slot.call = None
        call.tokens.put(token)
        return done


def act_as_client(number: int, server: Server, session: Recording, seen: list[Call]) -> None:
    random = Random(number)
    prompt = [1] + [random.randrange(5, 400) for _ in range(random.randrange(6, 40))]
    for _ in range(REQUESTS):
        call = Call(number, list(prompt), random.randrange(4, MOST_TOKENS))
        call.sent = time.monotonic_ns()
        with session.mark(f"client {number}") as span:
            server.calls.put(call)
            for _ in range(call.n_tokens):
                prompt.append(call.tokens.get(timeout=120))
                call.got.append(time.monotonic_ns())
            span.seq = call.slot
        call.done = time.monotonic_ns()
        seen.append(call)
        time.sleep(random.random() * 0.02)
        prompt = [*prompt[:60], random.randrange(5, 400)]


def main() -> None:
    model, log = sys.argv[1:]
    server = Server(model)
    seen: list[Call] = []
    with llamacpp_instr.record(log, force=True) as session:
        clients = [
            threading.Thread(target=act_as_client, args=(i, server, session, seen))
            for i in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        server.serve(CLIENTS * REQUESTS)
        for client in clients:
            client.join()
    print(json.dumps([call.seen() for call in seen]))


if __name__ == "__main__":
    main()
