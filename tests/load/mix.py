"""The requests of the clients in the load test, the same in every run.

No prompt is the beginning of another. A server keeps the tokens that a prompt shares with earlier
input, and a prompt that is evaluated one token at a time uses other kernels, with other rounding,
than one that is evaluated at once. With these prompts several tokens are always left to evaluate,
so an answer depends on the request alone, to the bit.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"

NAMES = ("Nora", "Ivy", "Clara", "Tom", "Mila", "Ben", "Ruby", "Leo")


@dataclass(frozen=True)
class Request:
    """One request, as JSON to `path`."""

    path: str
    body: str
    leave_after: int | None = None
    """the client hangs up after this many pieces of the stream"""

    @property
    def streams(self) -> bool:
        return bool(json.loads(self.body).get("stream"))

    @property
    def evaluates(self) -> bool:
        """Whether a server that accepts it runs the model."""
        return self.path in (COMPLETIONS, CHAT, EMBEDDINGS)

    def whole(self) -> Request:
        """The same request without a stream; its answer contains the number of tokens."""
        body = {**json.loads(self.body), "stream": False}
        return replace(self, body=json.dumps(body), leave_after=None)


def requests_of(client: int) -> list[Request]:
    """The requests of one client in order; then it starts again."""
    number = itertools.count()

    def prompt(then: str = "Once upon a time, there was") -> str:
        n = next(number)
        return f"{client}.{n}: {NAMES[(client + n) % len(NAMES)]} told a story. {then}"

    def completion(**settings: Any) -> Request:
        return Request(COMPLETIONS, json.dumps({"prompt": prompt(), **settings}))

    def chat(**settings: Any) -> Request:
        messages = [{"role": "user", "content": prompt("Tell one too.")}]
        return Request(CHAT, json.dumps({"messages": messages, **settings}))

    seed = 1000 * client
    long = prompt(" ".join(f"{name} went to the lake and found a red boat." for name in NAMES * 2))
    return [
        completion(max_tokens=40 + client, temperature=0),
        completion(max_tokens=100, temperature=0.8, seed=seed + 1),
        completion(max_tokens=24, temperature=0.9, seed=seed + 2, logprobs=3),
        completion(max_tokens=120, temperature=1.2, seed=seed + 3, stream=True),
        chat(max_tokens=30, temperature=0),
        Request(EMBEDDINGS, json.dumps({"input": prompt("A lake, a boat.")})),
        chat(max_tokens=80, temperature=0.9, seed=seed + 4, stream=True),
        replace(completion(max_tokens=300, temperature=1.5, seed=seed + 5, stream=True),
                leave_after=12 + client),
        completion(max_tokens=60, temperature=0.7, seed=seed + 6, repeat_penalty=1.2, top_k=12),
        Request(COMPLETIONS, json.dumps({"prompt": long * 4, "max_tokens": 9})),
        completion(max_tokens=12, temperature="hot"),
        Request(COMPLETIONS, json.dumps({"prompt": long, "max_tokens": 7, "temperature": 0})),
        Request("/v1/no/such/place", "{}"),
        completion(max_tokens=50, temperature=1, seed=seed + 7, mirostat_mode=2),
        chat(max_tokens=20, temperature=0.8, seed=seed + 8, logprobs=True, top_logprobs=2),
        Request("/extras/tokenize", json.dumps({"input": prompt()})),
        completion(max_tokens=16, temperature=0, grammar='root ::= (" " [a-z]+)+'),
        # until the story is over
        completion(max_tokens=0, temperature=0.6, seed=seed + 9),
    ]  # fmt: skip
