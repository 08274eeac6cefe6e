"""Forks one `instr` per request, with all modules already imported, so a kill takes milliseconds.

Requests and answers are lines of JSON: {"args", "cwd", "out"} -> {"pid"}, then {"status"}. The
command's output goes to the file "out", or to a pipe without a reader if it is null.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
import warnings

COMMONLY_USED = (
    "pandas",
    "pyarrow.parquet",
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
    "rich.console",
    "rich.table",
    "converters.analyses.blocks",
    "converters.exports.chrome",
    "converters.analyses.compare",
    "converters.analyses.memory",
    "converters.analyses.diff",
    "converters.exports.table_files",
    "converters.analyses.inspect",
    "converters.exports.perfetto",
    "converters.report.render",
    "converters.exports.tables",
    "llamacpp_instr.weights.compare",
)


def serve() -> None:
    _import_everything()
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        request = json.loads(line)
        # an interruption waits until the child has reached the command
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        child = os.fork()
        if child == 0:
            _become_instr(**request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        print(json.dumps({"pid": child}), flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), flush=True)


def _import_everything() -> None:
    for name in COMMONLY_USED:
        importlib.import_module(name)


def _become_instr(args: list[str], cwd: str, out: str | None) -> None:
    from llamacpp_instr.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    if out is None:
        reader, number = os.pipe()
        os.close(reader)
        errors = os.open("errors", os.O_WRONLY | os.O_CREAT)
    else:
        number = errors = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(number, 1)
    os.dup2(errors, 2)
    sys.argv = ["instr", *args]
    status = 130  # click is not there to catch an interruption
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:
        pass
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
