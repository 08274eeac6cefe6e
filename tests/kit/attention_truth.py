"""Counts the multiplications and additions of ggml's attention, as it runs.

`counting_library()` is the pinned source's own kernel with a counter in front of each product,
compiled alone and put before the real library (LD_PRELOAD). As a program, this decodes batches with
it and prints what each call of llama_decode counted:

    LD_PRELOAD=... python tests/kit/attention_truth.py MODEL LOG '{"settings": {}, "batches": []}'

A batch is a list of [sequence, first position, tokens], or ["remove", sequence, from, to].
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

BEGIN = "static void ggml_compute_forward_flash_attn_ext_f16_one_chunk("
END = "// ggml_compute_forward_flash_attn_back"
PRODUCTS = {  # where a product is computed -> how many multiplications with an addition it has
    "kq_vec_dot(DK,": "DK",
    "ggml_vec_mad_f16(DV,": "DV",
    "ggml_vec_mad_f32(DV,": "DV",
    "simd_gemm(KQ,": "Q_TILE_SZ * DK * KV_TILE_SZ",
    "simd_gemm(VKQ32,": "Q_TILE_SZ * KV_TILE_SZ * DV",
}
COUNTER = """
#include <atomic>
static std::atomic<long> counted;
extern "C" long attention_products() { return counted.exchange(0); }
"""


def counting_library() -> Path:
    """The library; it is built once for each source."""
    from llamacpp_instr.base.machine import cpu_identity
    from llamacpp_instr.base.system import cache_dir
    from llamacpp_instr.llama.build.wheel import wheel_key
    from tests.kit.native_kit import installed_library, locked, patched_tree

    cpu = patched_tree() / "ggml" / "src" / "ggml-cpu"
    source = (cpu / "ops.cpp").read_text()
    includes = "\n".join(re.findall(r"^#include .*$", source, re.MULTILINE))
    kernel = source[source.index(BEGIN) : source.index(END)]
    for product, amount in PRODUCTS.items():
        assert product in kernel, f"ggml computes its attention in another way: no {product}"
        kernel = kernel.replace(product, f"counted += {amount}; {product}")
    text = includes + COUNTER + kernel
    library = installed_library()
    key = wheel_key({"source": text, "cpu": cpu_identity(), "library": str(library)})
    place = cache_dir() / "tests" / f"attention-{key}"
    with locked(place) as done:
        if not done:
            place.mkdir(parents=True)
            (place / "attention.cpp").write_text(text)
            subprocess.run(
                [
                    os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-march=native", "-w",
                    "-shared", "-fPIC", "attention.cpp", "-o", "libattention.so",
                    *(f"-I{folder}" for folder in (cpu, cpu.parent, cpu.parent.parent / "include")),
                    f"-L{library}", "-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{library}",
                ],
                check=True, cwd=place,
            )  # fmt: skip
    return place / "libattention.so"


def counts(model: Path, log: Path, settings: dict[str, int], batches: list[Any]) -> list[int]:
    """FLOPs of attention in each llama_decode, counted in a child that records to `log`."""
    done = subprocess.run(
        [sys.executable, __file__, model, log, json.dumps([settings, batches])],
        env={**os.environ, "LD_PRELOAD": str(counting_library())},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    products: list[int] = json.loads(done.stdout)
    return [2 * n for n in products]


def main() -> None:
    model_path, log, what = sys.argv[1:]
    settings, batches = json.loads(what)
    import llama_cpp.llama_cpp as api

    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    products = ctypes.CDLL(None).attention_products
    products.restype = ctypes.c_long
    assert api._lib.llama_instr_begin(log.encode(), b"detailed", None, None, 1) == 0
    model = api.llama_model_load_from_file(model_path.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.flash_attn_type = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED
    for name, value in settings.items():
        setattr(params, name, value)
    context = api.llama_init_from_model(model, params)
    memory = api.llama_get_memory(context)
    products()
    counted = []
    for spans in batches:
        if spans[0] == "remove":
            assert api.llama_memory_seq_rm(memory, *spans[1:])
            continue
        batch = api.llama_batch_init(sum(n for _, _, n in spans), 0, 1)
        for seq, first, n in spans:
            for position in range(first, first + n):
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = 3 + position % 20, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
                batch.logits[i] = position == first + n - 1
                batch.n_tokens += 1
        status = api.llama_decode(context, batch)
        assert status == 0, (status, spans)
        counted.append(products())
        api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    assert api._lib.llama_instr_end() == 0
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
