"""Computes a model on a device, with and without a session, and compares the logits.

    device_session.py MODEL LOG LEVEL LAYERS [CONTEXTS]

`GGML_BACKEND_PATH` names the modules of devices, separated by colons. LAYERS go to them, the last
ones; -1 is all. LEVEL `exec` leaves the session to the environment. With 2 CONTEXTS, they submit
alternately. With 0, the session ends while a device still computes. Prints a JSON object: whether
the logits are equal to the bit, the devices with what ggml says about them, and the messages of
llama.cpp.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api

from tests.kit import probe

ggml = ctypes.CDLL(str(Path(api._lib._name).with_name("libggml.so.0")))
for _name in ("ggml_backend_load", "ggml_backend_dev_get"):
    getattr(ggml, _name).restype = ctypes.c_void_p
for _name in ("ggml_backend_dev_name", "ggml_backend_dev_description"):
    getattr(ggml, _name).restype = ctypes.c_char_p
    getattr(ggml, _name).argtypes = [ctypes.c_void_p]
ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]


def devices() -> dict[str, str]:
    found = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    return {
        ggml.ggml_backend_dev_name(of).decode(): ggml.ggml_backend_dev_description(of).decode()
        for of in found
    }


def memory() -> dict[str, tuple[int, int]]:
    """Total and free bytes of each device."""
    found = {}
    for i in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(i))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        found[ggml.ggml_backend_dev_name(device).decode()] = total.value, free.value
    return found


def begin(log: str, level: str) -> None:
    if level == "exec":
        return  # as `instr exec` has set the environment
    assert api._lib.llama_instr_begin(log.encode(), level.encode(), None, None, 1) == 0


def end(level: str) -> None:
    assert level == "exec" or api._lib.llama_instr_end() == 0


def submit(context: Any, tokens: list[int]) -> None:
    """Decode without waiting for the result."""
    array = (ctypes.c_int32 * len(tokens))(*tokens)
    assert api.llama_decode(context, api.llama_batch_get_one(array, len(tokens))) == 0


def context_of(model: Any) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 2, 2
    return api.llama_init_from_model(model, params)


def main(path: str, log: str, level: str, layers: int, contexts: int = 1) -> None:
    messages: list[str] = []
    listen = api.llama_log_callback(lambda _level, text, _data: messages.append(text.decode()))
    api.llama_log_set(listen, ctypes.c_void_p(0))
    for module in os.environ["GGML_BACKEND_PATH"].split(":"):
        assert ggml.ggml_backend_load(module.encode()), module
    params = api.llama_model_default_params()
    params.n_gpu_layers = layers
    model = api.llama_model_load_from_file(path.encode(), params)
    assert model
    equal = None
    if contexts == 1:
        plain = probe.compute(api, model, 2, 4)
        begin(log, level)
        recorded = probe.compute(api, model, 2, 4)
        equal = all(plain[name].tobytes() == recorded[name].tobytes() for name in plain)
        end(level)
    else:
        made = [context_of(model) for _ in range(contexts or 1)]
        submit(made[0], [1, 2, 3])  # the graph of a prompt exists, and so do its shaders
        api.llama_synchronize(made[0])
        begin(log, level)
        for i in range(4 if contexts else 1):
            for context in made:
                submit(context, [5 + i] * (40 if i == 0 else 1))
        for context in made[:contexts]:
            api.llama_synchronize(context)
        end(level)
        for context in made:
            api.llama_free(context)
    api.llama_model_free(model)
    print(
        json.dumps({"equal": equal, "devices": devices(), "memory": memory(), "messages": messages})
    )


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
