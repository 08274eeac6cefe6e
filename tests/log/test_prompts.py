"""Requests and their prompts, against what llama-cpp-python counted for its caller."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.flat import LineSelection, expand_lines
from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.converters.fleet.rows import write_rows
from llamacpp_instr.converters.live.state import LiveState
from llamacpp_instr.log.batches import Batches, Part
from llamacpp_instr.log.known import KnownStep
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.schema import Kv, StepBegin, Token
from llamacpp_instr.log.session import load_session
from tests.kit.completions import KINDS
from tests.kit.native_kit import ROOT
from tests.kit.reports import by_title, rows
from tests.kit.shifted import SHIFTS
from tests.load.account import read_recording


def read_json(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@dataclass(frozen=True)
class Recorded:
    log: Path
    calls: list[dict[str, Any]]
    """what the caller got"""

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_json(self.log)

    @property
    def prompts(self) -> list[int]:
        return [call["usage"]["prompt_tokens"] for call in self.calls]


@pytest.fixture(scope="module", params=sorted(KINDS))
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    log = tmp_path_factory.mktemp(request.param) / "it.log"
    command = [sys.executable, "-m", "tests.kit.completions", request.param, str(log)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Recorded(log, json.loads(done.stdout))


@pytest.mark.native
def test_each_call_is_a_request_with_its_tokens(recorded: Recorded) -> None:
    """Also one that computes nothing, because its prompt is in the cache."""
    _, requests = find_requests(load_session(recorded.log))
    assert [of.prompt + of.reused for of in requests] == recorded.prompts
    sampled = sum(event["event"] == "token" for event in recorded.events)
    assert sum(len(of.token_times) for of in requests) == sampled
    for request, call in zip(requests, recorded.calls, strict=True):
        # the count lacks an end token, and has the first token of an empty prompt
        tokens = len(request.token_times)
        assert abs(tokens - call["usage"]["completion_tokens"]) <= 1
        assert call["sent"] <= request.first <= request.token_times[0]
        assert request.token_times[-1] <= request.end <= call["done"]


def _steps_of_prompts(recorded: Recorded) -> set[int]:
    """The steps of each call before its first token."""
    begins = [(e["t"], e["step"]) for e in recorded.events if e["event"] == "step_begin"]
    tokens = [event["t"] for event in recorded.events if event["event"] == "token"]
    found = set()
    for call in recorded.calls:
        first = min(t for t in tokens if t >= call["sent"])
        found |= {step for t, step in begins if call["sent"] <= t < first}
    return found


def _session(log: Path) -> dict[int, str]:
    steps = load_session(log).steps
    return dict(zip(steps["step"].tolist(), steps["phase"].tolist(), strict=True))


def _tables(log: Path) -> dict[int, str]:
    steps = load_tables(log).steps
    return dict(zip(steps.step.tolist(), steps.phase.astype(str).tolist(), strict=True))


def _flat(log: Path) -> dict[int, str]:
    lines = map(json.loads, expand_lines(read_events(log), LineSelection((), None, None)))
    return {line["step"]: line["phase"] for line in lines if line["event"] == "op"}


def _chrome(log: Path) -> dict[int, str]:
    output = BytesIO()
    write_chrome(read_events(log), output)
    events = json.loads(output.getvalue())["traceEvents"]
    return {e["args"]["step"]: e["name"] for e in events if e.get("cat") == "step"}


def _fleet(log: Path) -> dict[int, str]:
    found: dict[int, str] = {}

    def write(table: str, of: list[dict[str, Any]]) -> None:
        found.update({row["step"]: row["phase"] for row in of} if table == "steps" else {})

    write_rows(log, "log", write, lenient=False)
    return found


def _live(log: Path) -> dict[int, str]:
    return {row.step: row.phase for row in followed(log).steps}


def followed(log: Path) -> LiveState:
    state = LiveState()
    for _, event in state.refs.follow(read_events(log)):
        if take := state.takers.get(type(event)):
            take(event)
    return state


@pytest.mark.native
@pytest.mark.parametrize("read", [_session, _tables, _flat, _chrome, _fleet, _live])
def test_a_step_is_a_prefill_if_a_prompt_is_in_it(
    recorded: Recorded, read: Callable[[Path], dict[int, str]]
) -> None:
    """Not if it has several tokens: a decode checks drafts, and a prompt may be one token."""
    found = read(recorded.log)
    prompts = _steps_of_prompts(recorded)
    assert {step for step, phase in found.items() if phase == "prefill"} == prompts
    assert {step for step, phase in found.items() if phase == "decode"} == found.keys() - prompts
    assert len(found) == sum(event["event"] == "step_begin" for event in recorded.events)


@pytest.mark.native
def test_prefills_have_the_tokens_that_the_prompts_had(recorded: Recorded) -> None:
    session = load_session(recorded.log)
    (prefill,) = (
        row
        for row in rows(by_title(compute_summary(session))["Speed"])
        if row["Phase"] == "prefill"
    )
    reused = sum(request.reused for request in find_requests(session)[1])
    assert prefill["prompt tokens"] == sum(recorded.prompts) - reused
    assert (reused == 0) is (recorded.log.parent.name.startswith("drafts"))
    state = followed(recorded.log)
    assert state.n_prompt == prefill["prompt tokens"]
    assert state.n_prompt == sum(second.prompt for second in state.seconds)
    assert state.lanes.n_requests == len(recorded.calls)


@pytest.mark.native
@pytest.mark.parametrize("recorded", ["drafts"], indirect=True)
def test_the_account_of_make_load_has_each_prompt(recorded: Recorded) -> None:
    """Also one of a single token, which the recorder calls a decode; but no drafts."""
    found = [of.prompt_tokens for of in read_recording(recorded.log).generations]
    assert found == recorded.prompts


@pytest.mark.native
def test_a_context_shift_makes_no_step_a_prefill(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    subprocess.run([sys.executable, "-m", "tests.kit.shifted", log], cwd=ROOT, check=True)
    phases, steps = _session(log), [e for e in read_json(log) if e["event"] == "step_begin"]
    back = sum(step["pos"] < before["pos"] for before, step in pairwise(steps))
    assert back == SHIFTS
    assert list(phases.values()) == ["prefill", *["decode"] * (len(steps) - 1)]


# --- by hand ---

PREFILL, DECODE = True, False
Turn = tuple[int, int, int, bool, bool]
"""position, tokens, outputs, whether a token is sampled then, and what it is"""


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([(0, 1, 1, True, PREFILL), (1, 1, 1, True, DECODE)], id="one token"),
        pytest.param(
            [(0, 8, 0, False, PREFILL), (8, 1, 1, True, PREFILL), (9, 1, 1, True, DECODE)],
            id="the last token of a prompt has a batch of its own",
        ),
        pytest.param(
            [(0, 8, 8, True, PREFILL), (8, 4, 4, True, DECODE), (10, 4, 4, True, DECODE),
             (4, 4, 4, True, PREFILL)],
            id="drafts, then a prompt that goes back",
        ),
        pytest.param(
            [(0, 8, 8, True, PREFILL), (0, 8, 8, False, PREFILL), (8, 8, 8, True, PREFILL),
             (16, 1, 1, True, DECODE)],
            id="a prompt in two batches with all logits",
        ),
        pytest.param(
            [(0, 8, 8, False, PREFILL), (8, 8, 8, True, PREFILL), (16, 1, 1, True, DECODE)],
            id="the first prompt, in two batches with all logits",
        ),
        pytest.param(
            [(0, 64, 1, False, PREFILL), (64, 1, 1, True, PREFILL), (65, 1, 1, True, DECODE)],
            id="the first prompt, a full batch and its last token",
        ),
        pytest.param(
            [(0, 8, 1, False, PREFILL), (8, 8, 1, False, PREFILL), (16, 2, 1, True, PREFILL),
             (18, 1, 1, True, DECODE)],
            id="the first prompt, in batches that each have an output",
        ),
        pytest.param([(300, 1, 1, True, DECODE), (301, 1, 1, True, DECODE)], id="the middle"),
        pytest.param([(300, 9, 1, True, PREFILL), (309, 1, 1, True, DECODE)], id="a loaded state"),
        pytest.param(
            [(0, 8, 1, False, PREFILL), (8, 1, 1, False, DECODE), (9, 1, 1, False, DECODE)],
            id="the application samples",
        ),
        pytest.param(
            [(0, 8, 0, False, PREFILL), (8, 1, 1, False, PREFILL), (9, 1, 1, False, DECODE),
             (8, 1, 1, False, PREFILL)],
            id="the application samples, a prompt in two batches, the same again",
        ),
        pytest.param(
            [(0, 8, 1, False, PREFILL), (8, 1, 1, False, DECODE), (9, 2, 2, False, PREFILL),
             (11, 1, 1, False, DECODE)],
            id="the application samples, a later prompt of two tokens with all logits",
        ),
        pytest.param(
            [(0, 63, 1, False, PREFILL), (63, 1, 1, False, DECODE)],
            id="the application samples, a prompt of one token less than a batch holds",
        ),
        pytest.param(
            [(0, 64, 64, False, PREFILL), (64, 1, 1, False, DECODE)],
            id="the application samples, a full batch with all logits",
        ),
        pytest.param(
            [(0, 8, 1, True, PREFILL), (8, 1, 0, False, DECODE), (9, 2, 0, False, PREFILL)],
            id="tokens without an output, one and then several",
        ),
        pytest.param(
            [(5, 2, 2, False, PREFILL), (7, 2, 1, True, PREFILL), (9, 1, 1, True, DECODE)],
            id="the middle, two tokens and two of which one has an output",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seq", [0, 3])
def test_what_is_a_prompt(turns: list[Turn], seq: int) -> None:
    batches = Batches(64)
    for step, (pos, tokens, outputs, sampled, prompt) in enumerate(turns):
        begin = StepBegin(
            t=step, step=step, ctx=0, kind="decode", phase="decode", n_tokens=tokens,
            n_outputs=outputs, n_seqs=1, pos=pos,
            seq=[seq], seq_pos=[pos], seq_tokens=[tokens], seq_outputs=[outputs],
        )  # fmt: skip
        (part,) = batches.parts(begin)
        assert part.prompt is prompt
        if sampled:
            batches.sampled(Token(t=step, ctx=0, step=step, seq=seq, index=0, id=1, text="", dur=1))


def prompts_of(batches: Batches, *turns: tuple[int, int, int]) -> list[bool]:
    """Whether the tokens of sequence 0 are of a prompt, for each step number, position and number
    of tokens; a token is sampled after each."""
    prompts = []
    for step, pos, tokens in turns:
        (part,) = batches.parts(of_one(step, pos, tokens))
        prompts.append(part.prompt)
        batches.sampled(Token(t=step, ctx=0, step=step, seq=0, index=0, id=1, text="", dur=1))
    return prompts


def test_a_single_token_after_the_end_of_its_request_is_a_prompt() -> None:
    batches = Batches(64)
    assert prompts_of(batches, (1, 0, 8), (2, 8, 1)) == [True, False]
    batches.request_ended(0, begin=0)
    assert prompts_of(batches, (3, 9, 1), (4, 10, 1)) == [True, False]


def test_an_end_that_comes_after_the_next_prompt_began_is_of_the_request_before() -> None:
    """A client that is slow to end its mark would otherwise cut the next request in two."""
    batches = Batches(64)
    assert prompts_of(batches, (2, 0, 8), (3, 8, 1), (4, 1, 6)) == [True, False, True]
    batches.request_ended(0, begin=1)
    assert prompts_of(batches, (5, 7, 1)) == [False]
    batches.request_ended(0, begin=1)
    assert prompts_of(batches, (6, 8, 1)) == [True], "the mark of the current request ended"


def test_a_request_that_waited_for_the_one_before_ends_with_its_own_mark() -> None:
    """It had arrived before the prompt of the other began."""
    batches = Batches(64)
    assert prompts_of(batches, (3, 0, 8)) == [True]
    batches.request_ended(0, begin=1)
    assert prompts_of(batches, (4, 8, 1), (5, 9, 1)) == [True, False]
    batches.request_ended(0, begin=2)
    assert prompts_of(batches, (6, 10, 1)) == [True]


def test_a_prompt_in_two_batches_is_one_whose_mark_ends_it() -> None:
    batches = Batches(64)
    assert [part.prompt for part in batches.parts(of_one(1, 0, 8, n_outputs=0))] == [True]
    assert prompts_of(batches, (2, 8, 8), (3, 16, 1)) == [True, False]
    batches.request_ended(0, begin=0)
    assert prompts_of(batches, (4, 17, 1)) == [True]


def test_a_token_of_several_sequences_ends_the_prompt_of_each() -> None:
    batches = Batches(64)
    pos = [[0, 0, 0], [8, 8, 8]]
    for step, (n, of) in enumerate(zip((8, 1), pos, strict=True)):
        begin = StepBegin(
            t=step, step=step, ctx=0, kind="decode", phase="decode", n_tokens=n, n_outputs=1,
            n_seqs=3, seq=[0, 1, 2], seq_pos=of, seq_tokens=[n] * 3, seq_outputs=[1] * 3,
        )  # fmt: skip
        assert [part.prompt for part in batches.parts(begin)] == [step == 0] * 3
        batches.sampled(Token(t=step, ctx=0, step=step, seq=-1, index=0, id=1, text="", dur=1))


def of_one(step: int, pos: int, tokens: int = 1, **more: Any) -> StepBegin:
    """A batch of one sequence, in a log that does not name it."""
    known: dict[str, Any] = {"kind": "decode", "phase": "decode", "n_outputs": 1, **more}
    return StepBegin(t=step, step=step, ctx=0, n_tokens=tokens, n_seqs=1, pos=pos, **known)


def test_a_batch_without_its_sequence_is_of_sequence_0() -> None:
    batches = Batches(64)
    (prompt,) = batches.parts(of_one(0, 0, 8))
    assert prompt == Part(seq=0, pos=0, tokens=8, outputs=1, prompt=True)
    (decode,) = batches.parts(of_one(1, 8))
    assert decode == Part(seq=0, pos=8, tokens=1, outputs=1, prompt=False)


def test_batches_of_several_sequences_that_are_not_named_are_unknown() -> None:
    assert Batches(64).parts(replace(of_one(0, 0, 8), n_seqs=2)) == []


@pytest.mark.parametrize(
    ("kind", "phase", "pos", "prompt"),
    [
        ("decode", "prefill", -1, True),
        ("decode", "decode", -1, False),
        ("encode", "encode", -1, True),
        ("encode", "encode", 5, True),
    ],
)
def test_without_positions_the_phase_of_the_recorder_counts(
    kind: str, phase: str, pos: int, prompt: bool
) -> None:
    (part,) = Batches(64).parts(of_one(0, pos, kind=kind, phase=phase))
    assert part.prompt is prompt


@pytest.mark.parametrize(
    ("shift", "end"),
    [
        pytest.param({"p0": 5, "arg": -3}, 5, id="inside the prompt"),
        pytest.param({"p0": None, "arg": -3}, 5, id="of everything"),
        pytest.param({"p0": 10, "arg": -3}, 7, id="behind it, to within it"),
        pytest.param({"p0": 10, "arg": -1}, 8, id="behind it"),
        pytest.param({"p0": 5, "arg": 3}, 8, id="backwards"),
        pytest.param({"p0": 5, "arg": None}, 8, id="by nothing"),
        pytest.param({"p0": 5, "arg": -3, "op": "seq_div"}, 8, id="a division"),
        pytest.param({"p0": 5, "arg": -3, "seq": 1}, 8, id="of another sequence"),
        pytest.param({"p0": 5, "arg": -3, "seq": None}, 8, id="of no sequence"),
    ],
)
def test_a_shift_moves_the_end_of_the_prompt(shift: dict[str, Any], end: int) -> None:
    """Tokens from there on are a decode; those before are a prompt again."""
    for pos, prompt in ((end, False), (end - 1, True)):
        batches = Batches(64)
        for step, (at, n) in enumerate(((0, 8), (8, 1), (9, 1), (10, 1))):
            batches.parts(of_one(step, at, n))
            batches.sampled(Token(t=0, ctx=0, step=step, seq=0, index=0, id=1, text="", dur=1))
        of = {"op": "seq_add", "seq": 0, "p1": -1} | shift
        batches.moved(Kv(t=0, ctx=0, used=11, size=64, bytes=0, n_kv=0, **of))
        (part,) = batches.parts(of_one(9, pos))
        assert part.prompt is prompt


@pytest.mark.parametrize(
    ("kind", "phase", "prompts", "found", "n_prompt"),
    [
        ("encode", "encode", [True], "encode", 3),
        ("encode", "encode", [], "encode", 9),
        ("decode", "decode", [], "decode", 0),
        ("decode", "prefill", [], "prefill", 9),
        ("decode", "decode", [False, True], "prefill", 3),
        ("decode", "prefill", [False, False], "decode", 0),
    ],
)
def test_the_phase_of_a_step_is_that_of_its_parts(
    kind: str, phase: str, prompts: list[bool], found: str, n_prompt: int
) -> None:
    """Each part has three tokens, the batch nine."""
    parts = [Part(i, 0, 3, 1, prompt) for i, prompt in enumerate(prompts)]
    step = KnownStep(of_one(0, 0, 9, kind=kind, phase=phase), 1, parts)
    assert (step.phase, step.n_prompt) == (found, n_prompt)
