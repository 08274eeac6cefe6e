"""Connections and their commands in a log: their times, and what `check` says about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.calls import CALLS, call_columns
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import load_parts, load_session
from tests.kit.log_readers import findings
from tests.kit.made_log import encode
from tests.kit.rpc_logs import Server, made_logs

LOG = Path(__file__).parent.parent / "fixtures" / "rpc.log"
EVENTS = [event for _, event in read_events(LOG)]
CONNECTION, RPC, END = 1, 2, 3
T = 81_000_400_000


def rpc(events: list[s.Event] = EVENTS) -> s.Rpc:
    return next(event for event in events if isinstance(event, s.Rpc))


def test_a_client_s_times_follow_from_their_columns() -> None:
    calls = load_session(LOG).calls
    assert tuple(calls.columns) == CALLS
    assert calls["number"].tolist() == [0, 1, 2, 3, 4]
    sent = [T, T + 120_000, T + 316_000, T + 2_992_000, T + 3_038_200]
    assert calls["sent"].tolist() == sent
    assert (calls["sent"] - calls["queued"]).tolist() == [0, 15_000, 4_000, 21_000, 190_000]
    assert (calls["written"] - calls["sent"]).tolist() == [9_000, 7_000, 6_000, 45_000, 8_000]
    assert (calls["answered"] - calls["written"])[[0, 1, 2, 4]].tolist() == [
        91_000, 180_000, 170_000, 940_000,
    ]  # fmt: skip
    assert calls["answered"][3] == -1, "it has no reply"
    assert calls["split"].tolist() == [-1, -1, -1, 1, -1]
    assert set(calls["received"].tolist()) == {-1}, "the server's log has that"


def test_a_server_s_times_follow_from_their_columns() -> None:
    event = s.Rpc(
        t=100, connection=0, first=7, command=[8, 10], request=[325, 13], reply=[4008, 0],
        gap=[0, 50], receive=[5, 6], work=[40, 70], answer=[3, 0], compute=[-1, 2],
    )  # fmt: skip
    columns = {name: of.tolist() for name, of in call_columns(event, "server").items()}
    assert columns["number"] == [7, 8]
    assert columns["arrived"] == [100, 198]
    assert columns["received"] == columns["started"] == [105, 204]
    assert columns["done"] == [145, 274]
    assert columns["replied"] == [148, 274]
    assert columns["compute"] == [-1, 2]
    assert columns["sent"] == columns["ran"] == [-1, -1]


def test_the_parts_of_a_session_have_all_commands(tmp_path: Path) -> None:
    path = made_logs(1, [Server("10.0.0.2")]).write(tmp_path)[0]
    parts = list(load_parts(path, part_rows=100))
    assert len(parts) > 1
    assert sum(len(part.calls) for part in parts) == len(load_session(path).calls)
    assert parts[-1].connections.keys() == {0}


@pytest.mark.parametrize(
    ("at", "changes", "message"),
    [
        (RPC, {"connection": 3}, "rpc: connection 3 was never given"),
        (RPC, {"queue": None}, "rpc: column `queue` is missing"),
        (RPC, {"work": [1] * 5}, "rpc: column `work` does not belong to a client"),
        (RPC, {"wait": [1]}, "rpc: column `wait` has 1 entries, `command` has 5"),
        (RPC, {"gap": [7, 0, 0, 0, 0]}, "rpc: `gap[0]` is 7: the first interval begins at `t`"),
        (RPC, {"command": [14, 15, 1, 10, 18]}, "rpc: Expected `int` <= 17 - at `command[4]`"),
        (RPC, {"arrive": [1] * 5}, "rpc: column `receive` is missing"),
        (CONNECTION, {"side": "server"}, "rpc: column `receive` is missing"),
        (END, {"connection": 3}, "connection_end: connection 3 was never given"),
        (END, {"commands": 4}, "connection_end: `commands` is 4, the connection has 5"),
    ],
)
def test_what_does_not_fit_has_a_message(
    at: int, changes: dict[str, Any], message: str, path: Path
) -> None:
    events = [replace(e, **changes) if i == at else e for i, e in enumerate(EVENTS)]
    found = [text for _, text in findings(path, encode(events)) if "bytes" not in text]
    assert found[:1] == [message]


def test_the_commands_of_a_connection_are_in_order(path: Path) -> None:
    """Also over several lines, and none after its end."""

    def found(*more: s.Event) -> list[str]:
        events = [*EVENTS[:END], *more, *EVENTS[END:]]
        messages = (text for _, text in findings(path, encode(events)))
        return [text for text in messages if "session_end" not in text]

    event = rpc()
    end = T + 3_986_200
    later = replace(event, first=5, t=end)
    (few,) = found(later)
    assert few == "connection_end: `commands` is 5, the connection has 10"
    assert found(replace(later, t=end - 1))[0] == (
        "rpc: begins 1 ns before the connection's previous command ended"
    )
    assert found(replace(later, first=4))[0] == (
        "rpc: `first` is 4, the connection's next command is 5"
    )
    assert found(EVENTS[CONNECTION])[0] == "connection: connection 0 was given before"
    assert found(EVENTS[END])[0] == "connection_end: connection 0 has ended"


def test_nothing_of_a_merged_log_runs_backwards(path: Path) -> None:
    """By more than the uncertainty plus the difference allowed between two clocks."""
    n = 5
    columns: dict[str, Any] = {
        "arrive": [20_000, 10_000, 10_000, 20_000, None], "receive": [10] * n, "work": [100] * n,
        "answer": [10] * n, "start": [-1, -1, -1, 50, -1], "run": [-1, -1, -1, 40, -1],
    }  # fmt: skip

    def found(**changes: Any) -> list[str]:
        events = [*EVENTS]
        events[CONNECTION] = replace(events[CONNECTION], uncertainty=9_000, id="a", offset=-5)
        events[RPC] = replace(events[RPC], **columns | changes)
        return [text for _, text in findings(path, encode(events)) if "bytes" not in text]

    assert found() == []
    assert found(arrive=[-10_010, 0, 0, 0, None]) == []
    assert found(arrive=[-10_011, 0, 0, 0, None]) == [
        "rpc: a request arrives 10001 ns before it was sent"
    ]
    late = 187_000 + 10_000 - 110
    assert found(arrive=[0, late, 0, 0, None]) == []
    assert found(arrive=[0, late + 1, 0, 0, None]) == [
        "rpc: a reply arrives 10001 ns before it was sent"
    ]
    calls = load_session(path).calls
    assert calls["received"].tolist()[3:] == [T + 2_992_000 + 10, -1]
    assert calls["ran"].tolist()[2:] == [-1, T + 2_992_060, -1]
    assert calls["ran_end"].tolist()[2:] == [-1, T + 2_992_100, -1]
