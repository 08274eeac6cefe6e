"""Records short runs of random models, the kernels of real decodes, and fits the costs to them.

The layers of a random model have different types, to measure all types in one decode. The time of a
kernel depends on shapes and types, not on values. Each weight repeats a few rows that ggml
quantized from random numbers, so a model of hundreds of megabytes is written in a second.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.machine import drop_cached, read_joules
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.llama.devices import ON_CPU
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import Interrupt, captured
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction.fit import Sample, fit, samples
from llamacpp_instr.prediction.probe.file import KernelModel
from llamacpp_instr.prediction.probe.measure import barriers, ggml
from llamacpp_instr.recording.session import record

ROWS = 64
"""that are quantized, and repeated"""
OCTAVES = 0.4
"""deviation of the rows' size, as in real models. On x86, ggml converts the 16-bit scale of each
block with a table of 256 KiB, and similar scales would need only a few lines of it."""
CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    """A Llama; a Mixtral if it has experts, a Gemma 3 if it has a window."""

    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int = 2048
    experts: int = 0
    used: int = 0
    """experts for each token"""
    window: int = 0
    """tokens that five of six layers look back"""
    head: int = 0
    """values of a head; by default the width divided by the heads"""

    @property
    def head_length(self) -> int:
        return self.head or self.width // self.heads


def write_random_layers(path: Path, shape: Shape, types: Sequence[str]) -> Path:
    """A model with a layer in each of `types`; its embeddings have the first."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "gemma3" if shape.window else "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(len(types))
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_key_length(shape.head_length)
        writer.add_value_length(shape.head_length)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def weight(name: str, type_: str, *ne: int) -> None:
        data = _random_tensor(random, type_, *ne)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType[type_])

    def norm(name: str, length: int = shape.width) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))

    width, feed_forward = shape.width, shape.feed_forward
    queries, kv = shape.head_length * shape.heads, shape.head_length * shape.kv_heads
    weight("token_embd", types[0], shape.vocabulary, width)
    if not shape.window:  # Gemma's embedding is also its output
        weight("output", types[-1], shape.vocabulary, width)
    norm("output_norm")
    for i, type_ in enumerate(types):
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        if shape.window:
            norm(f"blk.{i}.post_attention_norm")
            norm(f"blk.{i}.post_ffw_norm")
            for name in ("q", "k"):
                norm(f"blk.{i}.attn_{name}_norm", shape.head_length)
        for name, ne in (("q", (queries, width)), ("k", (kv, width)), ("v", (kv, width)),
                         ("output", (width, queries))):  # fmt: skip
            weight(f"blk.{i}.attn_{name}", type_, *ne)
        experts = (shape.experts,) if shape.experts else ()
        ending = "_exps" if experts else ""
        for name, ne in (("gate", (feed_forward, width)), ("up", (feed_forward, width)),
                         ("down", (width, feed_forward))):  # fmt: skip
            weight(f"blk.{i}.ffn_{name}{ending}", type_, *experts, *ne)
        if experts:
            weight(f"blk.{i}.ffn_gate_inp", "F32", shape.experts, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    drop_cached(path)
    return path


def _random_tensor(random: np.random.Generator, name: str, *ne: int) -> NDArray[np.uint8]:
    """Bytes of a tensor; `ne` in numpy's order, the length of a row last. A few quantized rows,
    others for each tensor: with equal ones, scores of attention would be so large that the
    processor computes with denormal numbers, which takes several times longer."""
    *above, n = ne
    sizes = 0.02 * 2 ** random.normal(0, OCTAVES, (ROWS, 1))
    values = random.standard_normal((ROWS, n), np.float32) * sizes.astype(np.float32)
    rows: NDArray[np.uint8] = values.view(np.uint8)
    if name != "F32":
        type_ = BY_NAME[name]
        rows = np.zeros((ROWS, type_.row_bytes(n)), np.uint8)
        at = values.ctypes.data, rows.ctypes.data
        ggml().ggml_quantize_chunk(type_.number, *at, 0, ROWS, n, None)
    return np.resize(rows, (*above, rows.shape[1]))


TYPES_OF_LAYERS = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""those that llama.cpp's common file types consist of"""
MIXED = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


TRIES = 3
MOVED = 1.5
"""times as long"""


@dataclass(frozen=True)
class Run:
    """What is decoded: `times` times `tokens` tokens after `past` tokens."""

    tokens: int
    times: int
    past: int = 0


@dataclass(frozen=True)
class Subject:
    """A model and its runs."""

    name: str
    shape: Shape
    types: Sequence[str]
    runs: Sequence[Run]
    repack: bool = True


_TIMES = {1: 25, 2: 12, 4: 12, 8: 12, 16: 9, 32: 7, 64: 7, 256: 3}
_SHORT = tuple(Run(tokens, times) for tokens, times in _TIMES.items())
_FAR = tuple(Run(1, times, past) for past, times in ((192, 15), (512, 15), (1520, 15), (3008, 11)))
_LONG = sorted(
    (*_FAR, Run(8, 5, past=300), Run(8, 5, past=1500), Run(64, 3, past=1000), Run(512, 2)),
    key=lambda run: run.past,
)
SMALL, MIDDLE = Shape(256, 768, 4, 2), Shape(1024, 2816, 16, 4)
SUBJECTS = (
    Subject("small", SMALL, TYPES_OF_LAYERS, _SHORT),
    Subject("middle", MIDDLE, TYPES_OF_LAYERS, (*_SHORT[:-1], Run(128, 3))),
    Subject("large", Shape(2048, 5632, 16, 8), TYPES_OF_LAYERS,
            (Run(1, 7), Run(4, 3), Run(16, 2))),
    *(
        # enough layers that keys and values come from memory
        Subject(name, Shape(1024, 256, heads, kv_heads), MIXED[:2] * 3, (*_SHORT[:1], *runs))
        for name, heads, kv_heads, runs in (
            ("attention-64", 16, 8, _LONG), ("attention-128", 8, 4, _LONG),
            ("attention-256", 4, 2, _LONG), ("near-128", 8, 2, _FAR),
        )
    ),
    Subject("experts", Shape(512, 512, 8, 2, experts=8, used=2), MIXED, _SHORT[:-1]),
    # with a vocabulary that reaches beyond the start of its file
    Subject("gemma", Shape(512, 1536, 2, 1, 49152, window=256, head=256), MIXED[:2] * 3,
            (*_SHORT[:1], *_FAR[:3], *_SHORT[3:4], Run(64, 4), Run(512, 2))),
    # of another width, which separates the costs of rows from those of bytes
    Subject("wide experts", Shape(1024, 256, 8, 2, experts=4, used=2), MIXED[:2],
            (*_SHORT[:1], *_SHORT[3:4], Run(64, 4))),
    Subject("plain", MIDDLE, TYPES_OF_LAYERS, (*_SHORT[:4], Run(64, 3)), repack=False),
)  # fmt: skip
"""the working sets of the first three lie in caches, between, and beyond most of them"""


@dataclass(frozen=True)
class Recorded:
    """The log of a subject, and the energy that its runs took."""

    model: str
    """the subject's name"""
    log: Path
    threads: int
    joules: float | None
    """of the processors; None if the system does not report it"""
    seconds: float


def record_subjects(
    folder: Path, threads: Sequence[int], subjects: Sequence[Subject] = SUBJECTS
) -> Iterator[Recorded]:
    """Writes the models and the logs into `folder`; yields each log once it is complete. A log
    after which the machine `has_moved` is recorded again, at most TRIES times in all."""
    first = barriers_of(threads)
    for subject in subjects:
        model = write_random_layers(folder / f"{subject.name}.gguf", subject.shape, subject.types)
        for n_threads in threads:
            log = folder / f"{subject.name}-{n_threads}.log"
            for _ in range(TRIES):
                before, begin = read_joules(), time.monotonic()
                record_runs(model, log, n_threads, subject.runs, subject.repack)
                seconds, after = time.monotonic() - begin, read_joules()
                if not has_moved(first, barriers_of([n_threads])):
                    break
            yield Recorded(subject.name, log, n_threads, joules_between(before, after), seconds)
        model.unlink()


def barriers_of(threads: Sequence[int]) -> dict[int, float]:
    """What a barrier takes now, ns, by threads; one thread has none."""
    return {of.threads: of.ns for of in barriers([n for n in threads if n > 1])}


def has_moved(before: Mapping[int, float], now: Mapping[int, float]) -> bool:
    """Whether the host of a virtual machine has put its CPUs elsewhere, so that threads are further
    from each other, or nearer: a barrier then takes a different time, and memory is read at a
    different rate."""
    return any(not 1 / MOVED < ns / before[n] < MOVED for n, ns in now.items() if n in before)


def record_runs(
    model: Path, log: Path, n_threads: int, runs: Sequence[Run], repack: bool = True
) -> None:
    """Records these runs of a model. The tokens are random: equal ones would all go to the same
    experts, and the attention of a real model takes 20 % longer for them. A run continues in the
    cache of the previous run, or in an empty one if that cache holds more than `past` tokens."""
    longest = max(run.past + run.tokens * (run.times if run.tokens == 1 else 1) for run in runs)
    largest = max(max(run.tokens for run in runs), 256 if any(run.past for run in runs) else 1)
    options = ContextOptions(
        ctx=-(-longest // 256) * 256, batch=largest, ubatch=largest, threads=n_threads
    )
    with captured(Interrupt()) as llama_log, record(log, level="detailed", force=True):
        with (
            LoadedModel(model, llama_log, placement=ON_CPU, use_extra_bufts=repack) as loaded,
            ModelContext(loaded, options) as context,
        ):
            tokens = np.random.default_rng(0).integers(0, loaded.n_vocab, longest).tolist()
            filled = 0
            for run in runs:
                if run.past < filled or not run.past:
                    context.clear()
                    filled = 0
                for begin in range(filled, run.past, largest):
                    context.decode(tokens[begin : min(begin + largest, run.past)])
                filled = run.past
                for _ in range(run.times):
                    if run.tokens > 1:
                        context.keep(run.past)
                        filled = run.past
                    context.decode(tokens[filled : filled + run.tokens])
                    filled += run.tokens
        gc.collect()


def joules_between(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> float | None:
    """Energy between two readings, in joules; None if there was nothing to read."""
    same = before.keys() & after.keys()
    if not same:
        return None
    # a counter that wrapped around is below its earlier value
    return sum((after[name][0] - before[name][0]) % after[name][1] for name in same)


def measure_kernels(
    threads: Sequence[int], on_progress: OnProgress, subjects: Sequence[Subject] = SUBJECTS
) -> KernelModel:
    """The costs for these numbers of threads; `on_progress` gets the recordings done and their
    total. Needs scipy. Must not be called while a session is recorded."""
    found: dict[str, list[Sample]] = defaultdict(list)
    joules: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    total = len(subjects) * len(threads)
    with temporary_directory("instr-probe-") as folder:
        for done, recorded in enumerate(record_subjects(folder, threads, subjects), 1):
            found[recorded.model] += samples(load_session(recorded.log))
            recorded.log.unlink()
            if recorded.joules is not None:
                joules[recorded.threads] += recorded.joules
                seconds[recorded.threads] += recorded.seconds
            on_progress(done, total)
    watts = {n: float(f"{joules[n] / seconds[n]:.4g}") for n in joules if joules[n] > 0}
    return fit(list(found.values()), watts)
