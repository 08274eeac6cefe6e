"""Computes a model with whichever llama_cpp is imported, and saves every logit.

A separate program, so that the patched and the unpatched library can run the same code:

    python tests/kit/probe.py MODEL OUT.npz --threads 2 [--level LEVEL --log LOG [--stats PATTERN]]
        [--lora ADAPTER --scale SCALE]

After `--then`, the same process does that again with other arguments. It imports nothing of this
product, which an environment with the unpatched library lacks.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from itertools import groupby
from typing import Any

import numpy as np

PROMPT_TOKENS = 40
DECODES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level")
    parser.add_argument("--log")
    parser.add_argument("--stats")
    parser.add_argument("--decodes", type=int, default=DECODES)
    parser.add_argument("--lora")
    parser.add_argument("--scale", type=float, default=1.0)
    words = groupby(sys.argv[1:], lambda word: word == "--then")
    runs = [parser.parse_args(list(of)) for is_end, of in words if not is_end]

    import llama_cpp.llama_cpp as api

    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    for args in runs:
        probe(api, args)


def probe(api: Any, args: argparse.Namespace) -> None:
    if args.level:
        stats = args.stats.encode() if args.stats else None
        status = api._lib.llama_instr_begin(args.log.encode(), args.level.encode(), None, stats, 1)
        assert status == 0, status
    model = api.llama_model_load_from_file(args.model.encode(), api.llama_model_default_params())
    assert model, "the model does not load"
    adapter = args.lora and api.llama_adapter_lora_init(model, args.lora.encode())
    vectors = compute(api, model, args.threads, args.decodes, adapter=adapter, scale=args.scale)
    api.llama_model_free(model)
    if args.level:
        ended = api._lib.llama_instr_end()
        assert ended == 0, ended
    np.savez(args.out, **vectors)


def compute(
    api: Any,
    model: Any,
    threads: int,
    decodes: int,
    cb_eval: Any = None,
    adapter: Any = None,
    scale: float = 1.0,
) -> dict[str, np.ndarray]:
    """Logits (or embeddings) of a prompt of two ubatches and of `decodes` single tokens.

    `cb_eval` is an eval callback for the context, which uses `adapter` with `scale`.
    """
    encodes = bool(api.llama_model_has_encoder(model))
    params = api.llama_context_default_params()
    params.n_ctx = 256
    params.n_batch = PROMPT_TOKENS
    whole = encodes or bool(api.llama_model_is_diffusion(model))  # cannot be split into ubatches
    params.n_ubatch = PROMPT_TOKENS if whole else PROMPT_TOKENS - 8
    params.n_threads = params.n_threads_batch = threads
    if cb_eval:
        params.cb_eval = cb_eval
    context = api.llama_init_from_model(model, params)
    assert context, "no context"
    if adapter:
        handle = (api.llama_adapter_lora_p_ctypes * 1)(adapter)
        api.llama_set_adapters_lora(context, handle, 1, (ctypes.c_float * 1)(scale))
    if not api.llama_get_memory(context):
        api.llama_set_embeddings(context, True)
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    vectors: dict[str, np.ndarray] = {}

    def run(function: Any, tokens: list[int], all_outputs: bool) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = api.llama_batch_get_one(array, len(tokens))
        flags = (ctypes.c_int8 * len(tokens))(*[int(all_outputs)] * len(tokens))
        flags[len(tokens) - 1] = 1
        batch.logits = flags
        status = function(context, batch)
        assert status == 0, status
        n_rows = len(tokens) if all_outputs else 1
        name = f"step{len(vectors)}"
        rows = api.llama_get_logits(context)
        if not rows:
            rows, width = api.llama_get_embeddings(context), api.llama_model_n_embd_out(model)
        else:
            width = n_vocab
        vectors[name] = np.ctypeslib.as_array(rows, (n_rows, width)).copy()

    prompt = [(7 * i + 3) % n_vocab for i in range(PROMPT_TOKENS)]
    if encodes:
        run(api.llama_encode, prompt, True)
    if api.llama_get_memory(context):
        run(api.llama_decode, prompt, True)
        for _ in range(decodes):
            last = list(vectors.values())[-1]
            run(api.llama_decode, [int(np.nan_to_num(last[-1]).argmax()) % n_vocab], False)
    elif not encodes:
        run(api.llama_decode, prompt, True)
    api.llama_free(context)
    return vectors


if __name__ == "__main__":
    sys.exit(main())
