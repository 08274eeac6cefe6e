"""Loads models with whichever llama_cpp is imported, and prints the buffer sizes in its own log.

A separate program, so that it can use the unpatched library, which has no recorder. It reads jobs
from standard input, `[[model, {n_ctx: …, type_k: …}], …]`, and prints for each the MiB by kind and
buffer, or null if llama.cpp refuses. It imports nothing of this product.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections import defaultdict
from typing import Any

import llama_cpp.llama_cpp as api

LINE = re.compile(r"([\w ]+?) (model|KV|RS|state|compute) buffer size = +([\d.]+) MiB")
KINDS = {"model": "weights", "KV": "cache", "RS": "cache", "state": "cache", "compute": "compute"}


def main() -> None:
    lines: list[str] = []
    receive = api.llama_log_callback(lambda _level, text, _data: lines.append(text.decode()))
    api.llama_log_set(receive, ctypes.c_void_p(0))
    api.llama_backend_init()
    answers = []
    for path, settings in json.load(sys.stdin):
        lines.clear()
        answers.append(buffers(lines) if load(path, settings) else None)
    print(json.dumps(answers))


def load(path: str, settings: dict[str, Any]) -> bool:
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if not model:
        return False
    params = api.llama_context_default_params()
    params.swa_full = False
    for name, value in settings.items():
        setattr(params, name, value)
    context = api.llama_init_from_model(model, params)
    if context:
        api.llama_free(context)
    api.llama_model_free(model)
    return bool(context)


def buffers(lines: list[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in "".join(lines).splitlines():
        if match := LINE.search(line):
            buffer = match[1].removesuffix(" DSV4").split()[0]
            found[KINDS[match[2]]][buffer] += float(match[3])
    return found


if __name__ == "__main__":
    main()
