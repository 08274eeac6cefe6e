"""ggml-rpc-server of `instr build --programs` records itself."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import read_events
from tests.kit.device_logs import check_coverage
from tests.kit.llama_programs import programs
from tests.kit.native_kit import DEMO
from tests.kit.rpc_kit import (
    client,
    recorded_server,
)

pytestmark = pytest.mark.native


def test_the_program_of_instr_build_records_itself(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with recorded_server(log, program=programs() / "ggml-rpc-server") as server:
        assert client(DEMO, tmp_path / "out.npz", [server.address]).returncode == 0
        assert server.stop() == -signal.SIGTERM
    assert list(check_log(log)) == []
    assert check_coverage(read_events(log))[""] > 200
