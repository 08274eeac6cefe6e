"""Every reader refuses the same events of a damaged log for the same reason, in flat memory."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.resolve import Resolver
from tests.kit.log_readers import READERS, assert_all_agree, refusal
from tests.kit.made_log import encode, make_log
from tests.kit.strategies import damaged_logs

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = [
    *(path.read_bytes() for path in sorted(FIXTURES.glob("*.log"))),
    *(encode(make_log(Random(i).randint, 2, level)) for i, level in enumerate(s.LEVELS)),
]


@given(log=damaged_logs(LOGS))
@settings(max_examples=150)
def test_all_readers_agree_on_what_is_whole(
    log: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every reader refuses the first event that `check` says is not whole, and no other."""
    assert_all_agree(tmp_path_factory.getbasetemp() / "damaged.log", log)


def test_all_readers_agree_on_an_event_that_is_alone_or_missing(tmp_path: Path) -> None:
    lines = (FIXTURES / "every-event.log").read_bytes().splitlines(keepends=True)
    for at in range(1, len(lines)):
        assert_all_agree(tmp_path / "damaged.log", lines[0] + lines[at])
        assert_all_agree(tmp_path / "damaged.log", b"".join(lines[:at] + lines[at + 1 :]))


@pytest.mark.parametrize("kind", [s.Token, s.StepBegin, s.Sync, s.Memory, s.Kv])
def test_an_unknown_context_is_refused_by_all(kind: type[s.Event], tmp_path: Path) -> None:
    lines = (FIXTURES / "every-event.log").read_bytes().splitlines()
    name = s.event_name(kind)
    at = next(i for i, line in enumerate(lines) if b'"event":"%s"' % name.encode() in line)
    path = tmp_path / "unknown.log"
    path.write_bytes(b"\n".join([*lines[:at], lines[at].replace(b'"ctx":0', b'"ctx":9')]))
    expected = f"{path}:{at + 1}: {name}: context 9 was never given"
    assert {refusal(reader, path) for reader in READERS} == {expected}
    assert expected in map(str, check_log(path))


def resolver(*kinds: type[s.Event]) -> tuple[Resolver, list[s.Event]]:
    """A resolver that has taken a log's session, models and contexts; and one event of each of
    these kinds."""
    events = make_log(Random(4).randint, n_contexts=1, level="detailed")
    refs = Resolver()
    for line, event in enumerate(events, 1):
        if isinstance(event, (s.SessionStart, s.Model, s.Tensor, s.Context)):
            assert list(refs.problems(event)) == []
            refs.take(line, event)
    return refs, [next(e for e in events if isinstance(e, kind)) for kind in kinds]


def problems(refs: Resolver, event: s.Event, **changes: object) -> list[str]:
    changed = msgspec.structs.replace(event, **changes)
    found = list(refs.problems(changed))
    refs.take(2, changed)
    return found


def test_only_the_graphs_of_a_context_that_were_used_last_can_be_named() -> None:
    refs, (graph, plan, compute) = resolver(s.Graph, s.Plan, s.Compute)
    for n in range(s.GRAPHS_KEPT):
        assert problems(refs, graph, graph=n) == []
        assert problems(refs, plan, plan=n, graph=n) == []
    assert problems(refs, compute, compute=0, graph=0, step=-1) == []
    assert problems(refs, graph, graph=s.GRAPHS_KEPT) == []
    assert problems(refs, compute, compute=1, graph=0, step=-1) == []
    reason = f"was given, but {s.GRAPHS_KEPT} others of its context were given or computed since"
    assert problems(refs, compute, compute=2, graph=1, step=-1) == [f"graph 1 {reason}"]
    assert len(refs.graphs) == s.GRAPHS_KEPT
    assert len(refs.plans) == s.GRAPHS_KEPT - 1


def test_only_the_contexts_that_were_named_last_can_be_named() -> None:
    refs, (context, graph, plan, sync) = resolver(s.Context, s.Graph, s.Plan, s.Memory)
    assert problems(refs, graph, graph=0) == []
    assert problems(refs, plan, plan=0, graph=0) == []
    for n in range(1, s.CONTEXTS_KEPT):
        assert problems(refs, context, ctx=n) == []
    assert problems(refs, sync, ctx=1) == []
    assert problems(refs, context, ctx=1000) == []
    assert problems(refs, context, ctx=1001) == []
    reason = f"was given, but {s.CONTEXTS_KEPT} others were named since"
    assert problems(refs, sync, ctx=1) == []
    assert problems(refs, sync, ctx=0) == [f"context 0 {reason}"]
    assert problems(refs, sync, ctx=2) == [f"context 2 {reason}"]
    assert len(refs.contexts) == s.CONTEXTS_KEPT
    assert not refs.graphs
    assert not refs.plans
