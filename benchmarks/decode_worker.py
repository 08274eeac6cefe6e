"""Decodes in blocks and prints the CPU nanoseconds of each: one process, one library.

    python benchmarks/decode_worker.py MODEL THREADS BLOCKS DECODES VARIANT [VARIANT ...]
    python benchmarks/decode_worker.py --recorded MODEL THREADS

DECODES of one token each, or with `NxM` N decodes of M tokens. `GGML_BACKEND_PATH` may name the
module of a device. Variants take turns, block by block: `off`, `again` (the same), a level
(with a session), or `callback` (a no-op eval callback in C that asks for every node). Prints one
JSON line: {variant: [ns, …]}. With --recorded, standard input names a log for each block: the log
is begun, and after one more line a block in it is measured. Imports nothing from this product, so
that the same program can measure the unpatched library.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api

N_CTX = 512
WARM_UP = 3
RECORDED_DECODES = 1200
NOOP = """
#include <stdbool.h>
bool noop(void * t, bool ask, void * data) { (void) t; (void) ask; (void) data; return true; }
"""


def main() -> None:
    arguments = sys.argv[1:]
    recorded = arguments[0] == "--recorded"
    model_path, threads, *rest = arguments[recorded:]
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    if module := os.environ.get("GGML_BACKEND_PATH"):
        ggml = ctypes.CDLL(str(Path(api._lib._name).with_name("libggml.so.0")))
        assert ggml.ggml_backend_load(module.encode()), module
    model = api.llama_model_load_from_file(model_path.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = N_CTX
    params.n_threads = params.n_threads_batch = int(threads)
    # one context for all variants without a callback, because its address affects the time
    shared = api.llama_init_from_model(model, params)
    if recorded:
        measure_named_logs(shared)
        return
    blocks, decodes, *variants = rest
    n, _, n_tokens = decodes.partition("x")
    size = int(n_tokens or 1)
    params.cb_eval = ctypes.cast(noop_callback(), type(params.cb_eval))
    observed = api.llama_init_from_model(model, params)
    times: dict[str, list[int]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as folder:
        for block in range(int(blocks)):
            for variant in variants if block % 2 else variants[::-1]:
                is_recorded = variant not in ("off", "again", "callback")
                if is_recorded:
                    # a new file each time: ext4 flushes a truncated file when it is closed
                    begin_log(f"{folder}/{block}-{variant}.log", variant)
                context = observed if variant == "callback" else shared
                decode(context, WARM_UP, size=size)
                times[variant].append(measure(context, int(n), is_recorded, WARM_UP, size))
    print(json.dumps(times))


def measure_named_logs(context: Any) -> None:
    for log in sys.stdin:
        begin_log(log.strip(), "detailed")
        decode(context, WARM_UP)
        print("begun", flush=True)
        sys.stdin.readline()
        print(measure(context, RECORDED_DECODES, True), flush=True)


def noop_callback() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "noop.so"
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
            input=NOOP, text=True, check=True,
        )  # fmt: skip
        return ctypes.CDLL(str(library)).noop


def begin_log(log: str, level: str) -> None:
    begun = api._lib.llama_instr_begin(log.encode(), level.encode(), None, None, 1)
    assert begun == 0, begun


def measure(context: Any, decodes: int, is_recorded: bool, before: int = 0, size: int = 1) -> int:
    """CPU ns of all threads for `decodes`, `before` decodes after the first, and for writing the
    rest of the log: after the last decode, it is part of the cost."""
    begin = time.process_time_ns()
    decode(context, decodes, before, size)
    assert not is_recorded or api._lib.llama_instr_end() == 0
    return time.process_time_ns() - begin


def decode(context: Any, n: int, before: int = 0, size: int = 1) -> None:
    tokens = (ctypes.c_int32 * size)(*[7] * size)
    for i in range(before, before + n):
        if i % ((N_CTX - 64) // size) == 0:
            api.llama_memory_clear(api.llama_get_memory(context), False)
        assert api.llama_decode(context, api.llama_batch_get_one(tokens, size)) == 0
    api.llama_synchronize(context)


if __name__ == "__main__":
    main()
