"""Phoenix reads what `instr to-otlp` sends: its spans are the requests of `instr requests`.

Not part of `make test`: it needs Phoenix. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kit.made_log import encode
from tests.kit.noted_log import noted
from tests.parts.peers.run_instr import instr

Json = dict[str, Any]


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with a database of its own."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(str(free.getsockname()[1]))
    place = tmp_path_factory.mktemp("phoenix")
    settings = {
        "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": ports[0], "PHOENIX_GRPC_PORT": ports[1],
        "PHOENIX_WORKING_DIR": str(place), "PHOENIX_TELEMETRY_ENABLED": "false",
    }  # fmt: skip
    address = f"http://127.0.0.1:{ports[0]}"
    with (place / "output").open("wb") as output, subprocess.Popen(
        [Path(sys.executable).with_name("phoenix"), "serve"],
        env={**os.environ, **settings}, stdout=output, stderr=subprocess.STDOUT,
    ) as server:  # fmt: skip
        try:
            while server.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"{address}/healthz"):
                    break
                time.sleep(0.1)
            assert server.poll() is None, (place / "output").read_text()
            yield address
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "server.log"
    path.write_bytes(encode(noted(Random(1))))
    return path


def spans_of(address: str, n: int) -> list[Json]:
    """All that it has, once there are `n`: it stores them some time after it accepted them."""
    while True:
        found: list[Json] = []
        cursor = ""
        while cursor is not None:
            url = f"{address}/v1/projects/default/spans?limit=500&cursor={cursor}"
            with urllib.request.urlopen(url.removesuffix("&cursor=")) as answer:
                page = json.load(answer)
            found += page["data"]
            cursor = page["next_cursor"]
        if len(found) >= n:
            return found
        time.sleep(0.1)


@pytest.fixture(scope="module")
def spans(phoenix: str, log: Path) -> list[Json]:
    """What it has of a log that it was sent twice."""
    lines = instr("to-otlp", log, "-o", "-", cwd=log.parent).splitlines()
    requests = (r for line in lines for r in json.loads(line)["resourceSpans"])
    n = sum(len(scope["spans"]) for of in requests for scope in of["scopeSpans"])
    for _ in range(2):
        instr("to-otlp", log, "--endpoint", phoenix, cwd=log.parent)
    found = spans_of(phoenix, n)
    time.sleep(2)
    assert len(spans_of(phoenix, n)) == len(found) == n, "a span that came twice is one"
    return found


def ns(span: Json) -> int:
    """Phoenix keeps microseconds."""
    begin, end = (datetime.fromisoformat(span[key]) for key in ("start_time", "end_time"))
    return round((end - begin).total_seconds() * 1e6) * 1000


def test_its_model_calls_are_the_requests(spans: list[Json], log: Path) -> None:
    *_, table = json.loads(instr("requests", log, "--top", 10_000, "--json", cwd=log.parent))
    calls = [span for span in spans if span["span_kind"] in ("LLM", "EMBEDDING")]
    own = "llamacpp_instr."
    shown = []
    for call in calls:
        of = call["attributes"]
        waits = [of[f"{own}wait.{name}_ns"] for name in ("queue", "prompt", "tokens", "others")]
        place = of[own + "context"], of[own + "sequence"]
        tokens = of["gen_ai.usage.input_tokens"], of["gen_ai.usage.output_tokens"]
        shown.append((*place, *tokens, *waits, of[own + "wait.rest_ns"]))
        assert ns(call) == pytest.approx(sum(shown[-1][4:]), abs=2000)
        if call["span_kind"] == "LLM":
            counts = of["llm.token_count.prompt"], of.get("llm.token_count.completion", 0)
            assert counts == tokens, "what Phoenix understands"
            assert of["llm.model_name"] == of["gen_ai.request.model"]
    assert sorted(shown) == sorted(
        (
            row["context"], row["sequence"], row["prompt"] + row["reused"], row["output"],
            row["queue"], row["its_prompt"], row["its_tokens"], row["other_requests"],
            row["the_rest"],
        )
        for row in table["rows"]
    )  # fmt: skip


def test_its_tree_has_the_parts_of_a_request(spans: list[Json]) -> None:
    ids = {(of["context"]["trace_id"], of["context"]["span_id"]): of for of in spans}
    parts = [of for of in spans if of["name"] in ("queue", "prefill", "decode")]
    assert len(parts) > len(spans) / 2
    for part in parts:
        whole = ids[part["context"]["trace_id"], part["parent_id"]]
        assert whole["start_time"] <= part["start_time"] <= part["end_time"] <= whole["end_time"]
    steps = sum(len(of["events"]) for of in parts)
    assert steps == sum(of["attributes"].get("llamacpp_instr.steps", 0) for of in parts) > 100


def test_what_was_cancelled_is_an_error(spans: list[Json]) -> None:
    cancelled = [of for of in spans if of["attributes"].get("error.type") == "cancelled"]
    assert cancelled
    assert {(of["status_code"], of["status_message"]) for of in cancelled} == {
        ("ERROR", "cancelled")
    }
