"""A server with continuous batching, recorded, and clients whose own clocks are the truth.

    python -m tests.kit.batch_server MODEL LOG [--clients 8] [--slots 4] [--requests 3]

Every client is a thread that sends requests, one after the other, and notes when it sent each and
when it got each token. A loop in the main thread serves all of them in one context, whose sequences
are its slots. A prompt reuses what its slot has of it. Prints what the clients saw, as JSON.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import llama_cpp.llama_cpp as api

import llamacpp_instr
from llamacpp_instr.recording.session import Recording

CTX = 1024
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


class Server:
    def __init__(self, model: str, n_slots: int) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(
            model.encode(), api.llama_model_default_params()
        )
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = CTX, 512, n_slots
        params.n_threads = params.n_threads_batch = 2
        params.kv_unified = True
        self.ctx = api.llama_init_from_model(self.model, params)
        self.memory = api.llama_get_memory(self.ctx)
        self.batch = api.llama_batch_init(512, 0, 1)
        self.sampler = api.llama_sampler_init_greedy()
        self.slots = [Slot(seq) for seq in range(n_slots)]
        self.calls: queue.Queue[Call] = queue.Queue()

    def serve(self, n_calls: int) -> None:
        """Serve that many calls."""
        left = n_calls
        while left:
            self._accept()
            if not any(slot.call for slot in self.slots):
                self._start(self.slots[0], self.calls.get())
            outputs = self._decode()
            for slot, output in outputs:
                left -= self._sample(slot, output)

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
        api.llama_memory_seq_rm(self.memory, slot.seq, same, -1)
        slot.cells = slot.cells[:same]
        slot.waiting = call.prompt[same:]
        slot.call, call.slot, call.reused = call, slot.seq, same

    def _decode(self) -> list[tuple[Slot, int]]:
        batch, n, outputs = self.batch, 0, []
        for slot in self.slots:
            for i, token in enumerate(slot.waiting):
                last = i == len(slot.waiting) - 1
                batch.token[n], batch.pos[n] = token, len(slot.cells)
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, slot.seq
                batch.logits[n] = last
                if last:
                    outputs.append((slot, n))
                slot.cells.append(token)
                n += 1
            slot.waiting = []
        batch.n_tokens = n
        assert api.llama_decode(self.ctx, batch) == 0
        return outputs

    def _sample(self, slot: Slot, output: int) -> bool:
        """Whether the call is done."""
        call = slot.call
        assert call is not None
        token = api.llama_sampler_sample(self.sampler, self.ctx, output)
        call.pushed.append(time.monotonic_ns())
        done = len(call.pushed) == call.n_tokens
        if done:
            slot.call = None
        else:
            slot.waiting = [token]
        call.tokens.put(token)
        return done


def act_as_client(
    number: int, n_calls: int, server: Server, session: Recording, seen: list[Call]
) -> None:
    random = Random(number)
    prompt = [1] + [random.randrange(5, 400) for _ in range(random.randrange(6, 40))]
    for _ in range(n_calls):
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
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("log")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--requests", type=int, default=3)
    asked = parser.parse_args()
    server = Server(asked.model, asked.slots)
    seen: list[Call] = []
    with llamacpp_instr.record(asked.log, force=True) as session:
        clients = [
            threading.Thread(target=act_as_client, args=(i, asked.requests, server, session, seen))
            for i in range(asked.clients)
        ]
        for client in clients:
            client.start()
        server.serve(asked.clients * asked.requests)
        for client in clients:
            client.join()
    print(json.dumps([call.seen() for call in seen]))


if __name__ == "__main__":
    main()
