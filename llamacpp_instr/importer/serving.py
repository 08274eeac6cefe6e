"""The child's side of `importer.child`.

Invariant: when standard input ends, for whatever reason, the child ends immediately and removes
what is unfinished. No code of a model's folder runs: neither a pickle's nor a Python file's.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamacpp_instr.errors import InstrError, UsageError

Answer = Callable[..., None]
Request = dict[str, Any]


def serve(
    work: Callable[[Request, Answer], Any], remove_unfinished: Callable[[Request], object]
) -> None:
    """Reads the request, does the work, and answers what it returns, or with what error it
    ended. The work may answer its progress: `answer("progress", done, total)`."""
    # libraries print to standard output; this descriptor is for answers only
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = json.loads(sys.stdin.buffer.readline())

    def end_with_input() -> None:
        sys.stdin.buffer.read()
        remove_unfinished(request)
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()

    def answer(kind: str, *values: Any) -> None:
        answers.write(json.dumps([kind, *values]) + "\n")
        answers.flush()

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        answer("done", work(request, answer))
    except InstrError as error:
        answer("error", str(error), error.exit_code)
    except BaseException as error:
        traceback.print_exc()
        answer("failed", type(error).__name__, str(error), getattr(error, "errno", None))


def run_no_code_of_the_folder() -> None:
    """Make transformers refuse the Python files that a folder may bring, and torch any pickle."""
    import torch
    import transformers.dynamic_module_utils as remote

    def refuse(class_name: str, module_path: str | os.PathLike[str], **_: Any) -> None:
        raise UsageError(
            f"the model needs its own Python code ({class_name} in {Path(module_path).name}), "
            "which instr does not run"
        )

    load = torch.load
    remote.get_class_in_module = refuse
    remote.TIME_OUT_REMOTE_CODE = 0  # it would ask on standard input
    torch.load = lambda *args, **options: load(*args, **{**options, "weights_only": True})


def check_pickles(files: list[Path]) -> None:
    """Raises UsageError for a pickle with more than tensors, which libraries would only refuse."""
    from llamacpp_instr.importer.meta import load_tensors, pickled_files

    for file in pickled_files(files):
        load_tensors(file)
