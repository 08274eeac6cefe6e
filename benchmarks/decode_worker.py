"""Decodes in blocks and prints the CPU nanoseconds of each: one process, one library.

    python benchmarks/decode_worker.py MODEL THREADS BLOCKS DECODES VARIANT [VARIANT ...]

Variants take turns, block by block: `off`, a level (with a session), or `callback` (a no-op eval
callback in C that asks for every node). Prints one JSON line: {variant: [ns, …]}. Imports nothing
of this product, so that the same program can measure the unpatched library.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 3
NOOP = """
#include <stdbool.h>
bool noop(void * t, bool ask, void * data) { (void) t; (void) ask; (void) data; return true; }
"""


def main() -> None:
    model_path, threads, blocks, decodes, *variants = sys.argv[1:]
    import llama_cpp.llama_cpp as api

    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(model_path.encode(), api.llama_model_default_params())
    with tempfile.TemporaryDirectory() as folder:
        # one context for all variants without a callback, because its address affects the time
        shared = make_context(api, model, int(threads), "off", Path(folder))
        observed = make_context(api, model, int(threads), "callback", Path(folder))
        contexts = {variant: observed if variant == "callback" else shared for variant in variants}
        times: dict[str, list[int]] = {variant: [] for variant in variants}
        for block in range(int(blocks)):
            for variant in variants if block % 2 else variants[::-1]:
                recorded = variant not in ("off", "callback")
                if recorded:
                    # a new file each time: ext4 flushes a truncated file when it is closed
                    log = f"{folder}/{block}-{variant}.log".encode()
                    begun = api._lib.llama_instr_begin(log, variant.encode(), None, None, 1)
                    assert begun == 0, begun
                # writing the rest of the log after the last decode is part of the cost
                end = api._lib.llama_instr_end if recorded else None
                times[variant].append(measure(api, contexts[variant], int(decodes), end))
    print(json.dumps(times))


def make_context(api: Any, model: Any, threads: int, variant: str, folder: Path) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx = 512
    params.n_threads = params.n_threads_batch = threads
    if variant == "callback":
        library = folder / "noop.so"
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
            input=NOOP, text=True, check=True,
        )  # fmt: skip
        noop = ctypes.CDLL(str(library)).noop
        params.cb_eval = ctypes.cast(noop, type(params.cb_eval))
    return api.llama_init_from_model(model, params)


def measure(api: Any, context: Any, decodes: int, end: Callable[[], int] | None) -> int:
    """CPU ns of all threads for `decodes` single tokens and `end`, after some warm-up decodes."""
    api.llama_memory_clear(api.llama_get_memory(context), False)
    token = (ctypes.c_int32 * 1)(7)
    begin = 0
    for i in range(WARM_UP + decodes):
        if i == WARM_UP:
            begin = time.process_time_ns()
        assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0
    assert end is None or end() == 0
    return time.process_time_ns() - begin


if __name__ == "__main__":
    main()
