"""Computes a model on RPC servers, and saves every logit.

    rpc_session.py MODEL OUT.npz SERVERS [--log LOG] [--level LEVEL] [--tokens N] [--decodes N]
        [--split A,B] [--also PID,...] [--cache-here]

SERVERS are HOST:PORT, with commas between them; "" is none. With LOG the session is recorded, from
before the servers are known until the model is freed. Prints a JSON object: the ns that the client
waited for the prompt of N tokens and for each decode, by its own clock, and the CPU time of all the
decodes, in ns, with that of the other processes. --cache-here keeps the KV cache on the client.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_instr.llama import native
from llamacpp_instr.llama.devices import Placement
from llamacpp_instr.recording.session import record


def cpu_of(processes: list[str]) -> int:
    """CPU time of this process and of others, in ns."""
    tasks = [task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()]
    others = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    return time.process_time_ns() + others


def decode(
    api: Any, model: Any, tokens: int, decodes: int, also: list[str], cache_here: bool
) -> tuple[dict[str, Any], list[Any]]:
    """What is printed, and the logits."""
    params = api.llama_context_default_params()
    params.n_ctx = max(256, tokens + decodes)
    params.offload_kqv = not cache_here
    params.n_threads = params.n_threads_batch = 1
    context = api.llama_init_from_model(model, params)
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    spans, logits, begin_cpu = [], [], 0
    for i in range(decodes + 1):
        begin_cpu = cpu_of(also) if i == 1 else begin_cpu
        ids = [n_vocab * k // tokens for k in range(tokens)] if i == 0 else [(31 * i) % n_vocab]
        array = (ctypes.c_int32 * len(ids))(*ids)
        begin = time.monotonic_ns()
        assert api.llama_decode(context, api.llama_batch_get_one(array, len(ids))) == 0
        row = api.llama_get_logits_ith(context, -1)  # waits
        spans.append(time.monotonic_ns() - begin)
        logits.append(np.ctypeslib.as_array(row, (n_vocab,)).copy())
    found = {"spans": spans, "cpu": cpu_of(also) - begin_cpu}
    api.llama_free(context)
    return found, logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("servers")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--level", default="detailed")
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--split", default="")
    parser.add_argument("--also", default="")
    parser.add_argument("--cache-here", action="store_true")
    args = parser.parse_args()
    servers = [of for of in args.servers.split(",") if of]
    shares = [float(of) for of in args.split.split(",") if of]
    api = native.import_llama_cpp().llama_cpp
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    recording = record(args.log, level=args.level, force=True) if args.log else None
    placement = Placement(rpc=servers, tensor_split=shares)
    placement.check()
    params = api.llama_model_default_params()
    settings = placement.settings()  # the model points into them
    for name, value in settings.items():
        setattr(params, name, value)
    model = api.llama_model_load_from_file(args.model.encode(), params)
    assert model, "the model does not load"
    also = [of for of in args.also.split(",") if of]
    found, logits = decode(api, model, args.tokens, args.decodes, also, args.cache_here)
    api.llama_model_free(model)
    if recording is not None:
        recording.close()
        assert not recording.problem, recording.problem
    np.savez(args.out, *logits)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
