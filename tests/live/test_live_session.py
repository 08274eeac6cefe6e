"""While nothing is written, time goes on for what follows a log."""

from __future__ import annotations

import time
from pathlib import Path

from tests.kit.pseudo_terminal import PATIENCE_S
from tests.live.followed_logs import followed, open_log


def test_time_goes_on_while_the_log_is_open_and_read(tmp_path: Path) -> None:
    log, rest = open_log(tmp_path)
    with followed(log) as (session, _):
        end = time.monotonic() + PATIENCE_S
        while session.is_catching_up:
            assert time.monotonic() < end
            time.sleep(0.01)
        first = session.look(lambda state: state.idle)
        time.sleep(0.02)
        second = session.look(lambda state: state.idle)
        assert second - first >= 20_000_000
        with log.open("ab") as file:
            file.write(rest)
        while session.over is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert session.look(lambda state: state.idle) == 0
