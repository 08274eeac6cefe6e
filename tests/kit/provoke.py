"""Records a session of the demo model that has one thing wrong, or nothing.

    python -m tests.kit.provoke WHAT MODEL LOG

WHAT is a key of KINDS, the name of the finding that it provokes. Some write a model beside the log,
because the demo model does not have what they need.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import llamacpp_instr
from llamacpp_instr.lab.quantize.plan import QuantizeOptions
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction.probe import measure
from llamacpp_instr.prediction.probe.file import Probe, probe_json
from llamacpp_instr.prediction.recorded import Shape, write_random_layers
from tests.kit.decoder import Decoder
from tests.kit.quantize_kit import quantize_model
from tests.kit.sparse_models import write_sparse_llama
from tests.kit.tiny_models import write_llama


def short_probe(*sizes: int) -> Probe:
    """What was measured, with the bandwidth of `sizes` in MiB."""
    shorter = {"SECONDS": 0.0, "SIZES": sizes, "TYPES_OF_WEIGHTS": ("F16",), "TOKENS": (1,)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shorter.items():
            patch.setattr(measure, name, value)
        return measure.measure(lambda *_: None)


with suppress(ImportError):  # tests read KINDS also where `instr build` did not run
    import llama_cpp.llama_cpp as api


def nothing(model: str, log: str) -> None:
    session = Decoder(model)
    session.generate()
    session.forget()
    with llamacpp_instr.record(log, force=True):
        session.generate()


def too_many_threads(model: str, log: str) -> None:
    session = Decoder(model, threads=(os.cpu_count() or 1) + 2)
    with llamacpp_instr.record(log, force=True):
        session.generate(n=20)


def small_batches(model: str, log: str) -> None:
    session = Decoder(model, n_batch=32, n_ubatch=32)
    session.generate(n_prompt=32, n=1)  # or the first of ten batches is a cold start
    session.forget()
    with llamacpp_instr.record(log, force=True):
        session.generate(n_prompt=300, n=5)


def rebuilt_graphs(model: str, log: str) -> None:
    """The number of sequences differs from step to step."""
    session = Decoder(model, n_seq_max=4)
    session.decode({seq: [1, 2, 3] for seq in range(4)})
    with llamacpp_instr.record(log, force=True):
        for i in range(80):
            session.decode({seq: [5 + i] for seq in range(1 + i % 4)})


def cold_start(model: str, log: str) -> None:
    """A model that was just mapped from its file, and the same short prompt three times."""
    with llamacpp_instr.record(log, force=True):
        session = Decoder(model)
        for _ in range(3):
            session.generate(n_prompt=2, n=0)
            session.forget()


def costly_sampling(model: str, log: str) -> None:
    """Twenty samplers sort the vocabulary, one after the other."""
    session = Decoder(model)
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for _ in range(20):
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_typical(0.99, 900))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
    session.sampler = chain
    session.generate(n=2)
    session.forget()
    with llamacpp_instr.record(log, force=True):
        session.generate()


def slow_application(model: str, log: str) -> None:
    session = Decoder(model)
    session.generate(n=2)
    session.forget()
    with llamacpp_instr.record(log, force=True):
        session.generate(pause=0.002)


def waiting_threads(_: str, log: str) -> None:
    """Hundreds of kernels of less than a microsecond, so that barriers cost more than they do."""
    model = write_llama(_beside(log), tokenizer="none", layers=20)
    _keep_the_cpu()
    session = Decoder(str(model), threads=2)
    session.generate(n_prompt=2, n=2)
    session.forget()
    with llamacpp_instr.record(log, level="verbose", force=True):
        session.generate(n_prompt=2, n=20)


def slow_threads(_: str, log: str) -> None:
    """The second thread shares its CPU with processes that never wait. The weights are so large
    that both spend most of their time in products."""
    cpu, shared = sorted(os.sched_getaffinity(0))[:2]
    model = write_random_layers(_beside(log), Shape(1024, 4096, 8, 8), ["F16"])
    with suppress(OSError):
        # ahead of other tests: priorities of threads hold only within a session, whose own priority
        # is in this file (man 7 sched, autogroup)
        os.setsid()
        Path("/proc/self/autogroup").write_text("-20", encoding="ascii")
    session = Decoder(str(model), threads=2)
    session.generate(n_prompt=2, n=2)
    session.forget()
    for task in Path("/proc/self/task").iterdir():
        is_first = int(task.name) == os.getpid()
        os.sched_setaffinity(int(task.name), {cpu if is_first else shared})
        # the second thread gets a tenth of its CPU or less, so that it is the slow one even while
        # other work takes most of the first one's
        os.setpriority(os.PRIO_PROCESS, int(task.name), 0 if is_first else 8)
    forever = (
        f"import os; os.sched_setaffinity(0, {{{shared}}}); print(flush=True)\nwhile True: pass"
    )
    busy = [
        subprocess.Popen([sys.executable, "-c", forever], stdout=subprocess.PIPE) for _ in range(2)
    ]
    for process in busy:
        assert process.stdout is not None
        process.stdout.readline()
    with suppress(PermissionError):
        # of this thread alone, after the processes began: the other CPU may also be shared
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    try:
        with llamacpp_instr.record(log, level="verbose", force=True):
            session.generate(n_prompt=2, n=60)
    finally:
        for process in busy:
            process.kill()


def held_twice(model: str, log: str) -> None:
    """Weights of a type that ggml repacks. Prints how many bytes of the file are mapped then."""
    options = QuantizeOptions(pure=True)
    path = _beside(log)
    quantize_model(load_model_file(Path(model)), "Q4_0", path, options)
    with llamacpp_instr.record(log, force=True):
        session = Decoder(str(path))
        session.generate(n=5)
        print(_mapped_bytes(path))


def no_interleaved_kernel(model: str, log: str) -> None:
    """One small weight of each layer has a type that ggml repacks."""
    options = QuantizeOptions(pure=True, tensor_types=[("attn_output", BY_NAME["Q4_0"])])
    path = _beside(log)
    quantize_model(load_model_file(Path(model)), "Q5_0", path, options)
    with llamacpp_instr.record(log, force=True):
        session = Decoder(str(path))
        session.generate(n=20)


def memory_bound(_: str, log: str) -> None:
    """Weights of 99 MB, all of which each token reads. Writes what the memory gave right after."""
    model = write_sparse_llama(_beside(log), layers=1, width=1024, feed_forward=4096)
    _keep_the_cpu()
    session = Decoder(str(model))
    session.generate(n_prompt=2, n=2)
    session.forget()
    with llamacpp_instr.record(log, force=True):
        session.generate(n_prompt=2, n=8)
    Path(log).with_suffix(".probe").write_bytes(probe_json(short_probe(64, 256)))


def _beside(log: str) -> Path:
    return Path(log).with_suffix(".gguf")


def _keep_the_cpu() -> None:
    """Let no other test interrupt this process, where the system allows that."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _mapped_bytes(path: Path) -> int:
    """How much of a file is in the memory of this process, as Linux counts it."""
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            inside = rest[-1] == str(path)
        elif inside and key == "Rss:":
            total += int(rest[0]) * 1024
    return total


KINDS: dict[str, Callable[[str, str], None]] = {
    "nothing": nothing,
    "too-many-threads": too_many_threads,
    "small-batches": small_batches,
    "rebuilt-graphs": rebuilt_graphs,
    "cold-start": cold_start,
    "costly-sampling": costly_sampling,
    "slow-application": slow_application,
    "waiting-threads": waiting_threads,
    "slow-threads": slow_threads,
    "held-twice": held_twice,
    "no-interleaved-kernel": no_interleaved_kernel,
    "memory-bound": memory_bound,
}


if __name__ == "__main__":
    KINDS[sys.argv[1]](sys.argv[2], sys.argv[3])
