"""What a log says of sequences, against what the process itself knows."""

from __future__ import annotations

from pathlib import Path

import pytest

import llamacpp_instr
from llamacpp_instr.base.errors import UsageError
from tests.conftest import read_events
from tests.kit.decoder import Decoder
from tests.kit.native_kit import DEMO

pytestmark = pytest.mark.native
api = pytest.importorskip("llama_cpp.llama_cpp")  # tests of other files need no `instr build`


def test_a_step_names_its_sequences_and_a_token_its_own(tmp_path: Path) -> None:
    session = Decoder(str(DEMO), n_seq_max=3)
    with llamacpp_instr.record(tmp_path / "a.log", level="minimal"):
        session.decode({seq: [1, 7, 9] for seq in range(3)})
        for output in (8, 2, 5, -1, -3):
            session.sample(output)
        session.decode({0: [4], 1: [4]})
        session.decode({0: [5, 6, 7]})
        session.sample(2)
    api.llama_free(session.ctx)
    keys = ("seq", "seq_pos", "seq_tokens", "seq_outputs")
    steps = [
        {key: step[key] for key in keys if key in step}
        for step in read_events(tmp_path / "a.log", "step_begin")
    ]
    assert steps == [
        {"seq": [0, 1, 2], "seq_pos": [0, 0, 0], "seq_tokens": [3, 3, 3]},
        {"seq": [0, 1], "seq_pos": [3, 3]},
        {"seq": [0], "seq_pos": [4], "seq_tokens": [3]},
    ]
    tokens = read_events(tmp_path / "a.log", "token")
    assert [token["seq"] for token in tokens] == [2, 0, 1, 2, 0, 0]


def test_a_mark_names_its_sequence_at_its_end(tmp_path: Path) -> None:
    with llamacpp_instr.record(tmp_path / "a.log", level="minimal") as session:
        with session.mark("GET /") as request:
            request.seq = 7
        with session.mark("other"):
            pass
        with session.mark("first") as request:
            request.seq = 0
        refused = pytest.raises(UsageError, match="256 is not in 0 to 255")
        with refused, session.mark("wrong") as request:
            request.seq = 256
    marks = read_events(tmp_path / "a.log", "mark")
    assert [mark.get("seq") for mark in marks] == [None, 7, None, None, None, 0, None, None]
