"""Computes every model of a folder in one process, and counts or records what ggml runs.

    python tests/kit/probe_architectures.py FOLDER count            the nodes of each model, as JSON
    python tests/kit/probe_architectures.py FOLDER experts          the experts that it uses
    python tests/kit/probe_architectures.py FOLDER record LOGS      a log of each model

`count` and `experts` use llama.cpp's own eval callback, which gets every node of every computed
graph. With the unpatched library it gives the truth that the logs are compared with.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from probe import compute

DECODES = 3

# enum ggml_op: NONE, RESHAPE, VIEW, PERMUTE, TRANSPOSE run no kernel; found by name, not by number
EMPTY_OPS = (b"NONE", b"RESHAPE", b"VIEW", b"PERMUTE", b"TRANSPOSE")
FLAG_COMPUTE = 16


class Tensor(ctypes.Structure):
    """The first fields of `struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )


def main() -> None:
    folder, action, *rest = sys.argv[1:]
    import llama_cpp.llama_cpp as api

    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.gguf")):
        if action == "count":
            found[path.stem] = count_nodes(api, path)
        elif action == "experts":
            found[path.stem] = find_experts(api, path)
        else:
            record(api, path, Path(rest[0]) / f"{path.stem}.log")
    print(json.dumps(found))


def count_nodes(api: Any, path: Path) -> int:
    """Number of nodes for which a kernel runs, over all computed graphs."""
    op_name = names_of_ops(api)
    seen = 0

    def callback(tensor: int, ask: bool, _data: Any) -> bool:
        nonlocal seen
        if ask:
            node = Tensor.from_address(tensor)
            seen += op_name(node.op) not in EMPTY_OPS and bool(node.flags & FLAG_COMPUTE)
        return not ask

    observe(api, path, callback)
    return seen


def find_experts(api: Any, path: Path) -> list[tuple[dict[int, int], int]]:
    """For each MUL_MAT_ID that was computed: how many of its ids name each expert, and the bytes of
    an expert."""
    op_name = names_of_ops(api)
    found = []

    def callback(tensor: int, ask: bool, _data: Any) -> bool:
        node = Tensor.from_address(tensor)
        is_wanted: bool = op_name(node.op) == b"MUL_MAT_ID"
        if ask or not is_wanted:
            return is_wanted
        weight, ids = Tensor.from_address(node.src[0]), Tensor.from_address(node.src[2])
        at = (
            ids.data + token * ids.nb[1] + place * ids.nb[0]
            for token in range(ids.ne[1])
            for place in range(ids.ne[0])
        )
        uses = Counter(ctypes.c_int32.from_address(address).value for address in at)
        found.append((dict(uses), weight.nb[2]))
        return True

    observe(api, path, callback)
    return found


def names_of_ops(api: Any) -> Any:
    op_name = api._lib.ggml_op_name
    op_name.restype = ctypes.c_char_p
    return op_name


def observe(api: Any, path: Path, callback: Any) -> None:
    kind = dict(api.llama_context_params._fields_)["cb_eval"]
    function = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    held = function(callback)
    run(api, path, ctypes.cast(held, kind))


def record(api: Any, path: Path, log: Path) -> None:
    assert api._lib.llama_instr_begin(str(log).encode(), b"detailed", None, None, 1) == 0
    run(api, path, None)
    assert api._lib.llama_instr_end() == 0


def run(api: Any, path: Path, cb_eval: Any) -> None:
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    assert model, path
    compute(api, model, 1, DECODES, cb_eval)
    api.llama_model_free(model)


if __name__ == "__main__":
    main()
