"""Runs command lines in one process with little memory and time:

    python -m tests.fuzz.limited RESULTS < LINES

Each line of LINES is a JSON array, the arguments of `instr`. RESULTS gets a line for each command
that failed with an error that is not ours, or took too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from pathlib import Path

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.cli import main
from llamacpp_instr.cli.logs import Logs
from llamacpp_instr.cli.look import convert

MEMORY = 1 << 30
"""bytes of memory of the process, including the interpreter and its libraries"""
SECONDS = 20.0
"""of CPU time for each command line"""


class Slow(BaseException):
    """Not an Exception, so that no code catches it."""


def _too_slow(_number: int, _frame: object) -> None:
    raise Slow


def limited(results: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, _too_slow)
    with results.open("w", encoding="utf-8") as out:
        for line in sys.stdin:
            arguments = json.loads(line)
            # if the process dies, the reader knows in which command
            print(line.strip(), file=out, flush=True)
            failure = _failure_of(arguments)
            print(json.dumps(failure), file=out, flush=True)


def _failure_of(arguments: list[str]) -> str:
    """What is wrong with how a command ended; empty if nothing is."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        if arguments[0] == "view":
            convert(Logs((arguments[1],)), Path(arguments[2]))  # before serving
        else:
            main(arguments)
    except InstrError:
        return ""
    except SystemExit as left:
        return "" if left.code in (0, 1, 2) else f"exit status {left.code}"
    except Slow:
        where = traceback.extract_tb(sys.exc_info()[2])[-2]
        return f"more than {SECONDS} s of CPU time, at {where.filename}:{where.lineno}"
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


if __name__ == "__main__":
    limited(Path(sys.argv[1]))
