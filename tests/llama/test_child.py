"""A function in a child process: its result, its error, or why the process ended."""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.llama.crashes import ChildEnded, call_in_child
from llamacpp_instr.recording.memory.plan import LoadError
from tests.kit.native_kit import ROOT

pytestmark = pytest.mark.native

MIB = 1 << 20


def add(one: int, other: int) -> int:
    """Also prints, as C code might; that does not belong to the result."""
    os.write(1, b"adding\n")
    return one + other


def refuse() -> None:
    raise LoadError("no, surrogate \udcff")


def leave(status: int) -> None:
    os.write(2, b"the reason\n")
    os._exit(status)


def crash(number: int) -> None:
    os.kill(os.getpid(), number)


def take(n_bytes: int) -> int:
    return len(bytes(n_bytes))


def take_in_c(n_bytes: int) -> bool:
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    return bool(malloc(n_bytes))


def write_pid_and_wait(file: Path) -> None:
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    time.sleep(600)


def divide() -> float:
    return 1 / 0


def test_results_and_errors_come_back() -> None:
    assert call_in_child(MIB * 64, add, 2, 3) == 5
    with pytest.raises(LoadError, match=r"^no, surrogate \udcff$"):
        call_in_child(MIB * 64, refuse)


def answer(answer: bytes) -> int:
    """Writes an answer of its own, as a child could that a model file took over."""
    os.write(3, answer)
    os._exit(0)


class Harm:
    """What a pickle could do: write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def test_an_answer_runs_no_code(tmp_path: Path) -> None:
    for reply in (pickle.dumps(Harm(tmp_path / "harm")), b"r" + pickle.dumps(1), b"r\xa1x", b"r"):
        with pytest.raises((ChildEnded, InstrError)):
            call_in_child(MIB * 64, answer, reply)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_is_an_end(status: int) -> None:
    with pytest.raises(ChildEnded, match=rf"^the reason \(exit status {status}\)$"):
        call_in_child(MIB * 64, leave, status)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_a_signal_is_an_end(name: str) -> None:
    number = getattr(signal, name)
    with pytest.raises(ChildEnded, match=f"^{name}$") as ended:
        call_in_child(MIB * 64, crash, number)
    assert ended.value.number == number


def test_memory_is_limited() -> None:
    assert call_in_child(MIB * 512, take, MIB * 256) == MIB * 256
    with pytest.raises(ChildEnded, match=r"it takes more than 0\.3 GB of memory"):
        call_in_child(MIB * 256, take, MIB * 512)
    assert not call_in_child(MIB * 256, take_in_c, MIB * 512)


def test_a_bug_of_ours_is_no_end() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        call_in_child(MIB * 64, divide)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_caller(number: int, tmp_path: Path) -> None:
    code = f"""if True:
        from pathlib import Path
        from llamacpp_instr.llama.crashes import call_in_child
        from tests.llama.test_child import write_pid_and_wait
        call_in_child({MIB * 64}, write_pid_and_wait, Path({str(tmp_path / "pid")!r}))
    """
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not (tmp_path / "pid").exists():
        assert caller.poll() is None
        time.sleep(0.01)
    child = os.pidfd_open(int((tmp_path / "pid").read_text()))
    caller.send_signal(number)
    caller.wait()
    assert select.select([child], [], [], 60)[0], "the child still runs"
    os.close(child)
