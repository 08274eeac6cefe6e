"""`instr merge`: where its log goes, what it prints, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamacpp_instr.log.session import load_session
from tests.kit.in_process import instr_here, printed, refusal
from tests.kit.rpc_logs import Server, made_logs


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    servers = [Server("10.0.0.2", 3_600_000_000_000), Server("10.0.0.3", -5_000_000_000)]
    return made_logs(1, servers).write(tmp_path)


def test_it_names_its_log_and_says_how_the_clocks_were_joined(logs: list[Path]) -> None:
    output = logs[0].with_name("session.log")
    done = instr_here("merge", *logs, "-o", output)
    assert (done.returncode, done.stdout) == (0, f"{output}\n")
    clocks = [
        line.partition("; clock ")[2].split(" s from")[0] for line in done.stderr.splitlines()
    ]
    assert [round(float(seconds.replace(",", ""))) for seconds in clocks] == [3600, -5]
    assert printed("check", output) == f"{output}: clean\n"
    assert "RPC0[10.0.0.3:50052]" in printed("stats", output, "--by", "device")


def test_it_writes_to_standard_output_and_overwrites_nothing(logs: list[Path]) -> None:
    output = logs[0].with_name("session.log")
    output.write_text("mine")
    exists = f"Error: {output} exists; use --force to overwrite it"
    assert refusal("merge", *logs, "-o", output) == exists
    piped = instr_here("merge", *logs, "-o", "-").stdout
    printed("merge", *logs, "-o", output, "--force")
    assert output.read_text() == piped
    assert "would overwrite the input" in refusal("merge", *logs, "-o", logs[1], "--force")


def test_it_reads_each_log_twice_so_none_can_be_a_pipe(logs: list[Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    message = " can be read only once, and merge reads each log twice; save it"
    for name in ("-", tmp_path / "pipe"):
        assert refusal("merge", logs[0], name, "-o", tmp_path / "out") == f"Error: {name}{message}"


def test_a_server_without_a_log_stays_a_device_that_is_not_timed(logs: list[Path]) -> None:
    output = logs[0].with_name("session.log")
    done = instr_here("merge", *logs[:2], "-o", output)
    missing = "10.0.0.3:50052: no log of this server; its kernels have no times"
    assert done.stderr.splitlines()[-1] == missing
    assert "RPC0[10.0.0.3:50052]" in printed("summary", output)


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_line_costs_only_that_line(which: int, logs: list[Path]) -> None:
    log, output = logs[which], logs[0].with_name("session.log")
    log.write_bytes(log.read_bytes().replace(b'"event":"ops"', b'"event":"op"', 1))
    assert f"{log}:" in refusal("merge", *logs, "-o", output)
    assert not output.exists()
    done = instr_here("merge", *logs, "--lenient", "-o", output)
    assert done.returncode == 0, done.stderr
    assert f"{log}: 1 damaged line was skipped" in done.stderr
    assert len(load_session(output).device_ops) == 2


def test_nothing_is_written_if_the_logs_do_not_belong_together(
    logs: list[Path], tmp_path: Path
) -> None:
    output, other = tmp_path / "session.log", tmp_path / "other"
    other.mkdir()
    stranger = made_logs(2, [Server("10.0.0.4")]).write(other)[1]
    assert "does not belong to" in refusal("merge", logs[0], stranger, "-o", output)
    assert not output.exists()
