"""LoRA adapters: recording changes nothing of what they do, and the log has those that were set."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import llamacpp_instr
from llamacpp_instr.converters.analyses.memory import StoredModel, memory_report, recorded_memory
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr, read_events
from tests.kit.adapters import ROLES, write_adapter, write_merged
from tests.kit.native_kit import DEMO, run_probe

pytestmark = pytest.mark.native
api = pytest.importorskip("llama_cpp.llama_cpp")  # tests of other files need no `instr build`
LAYERS = 4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of them for the demo model, the second of another rank and without an alpha."""
    directory = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(directory / "one.gguf", DEMO),
        write_adapter(directory / "two.gguf", DEMO, rank=4, alpha=0, roles=("ffn_up",), seed=2),
    ]


def logits(out: Path, model: Path, *words: object, unpatched: bool = False) -> list[np.ndarray]:
    run_probe(out, model, *map(str, words), unpatched=unpatched)
    with np.load(out) as saved:
        return [saved[name] for name in saved.files]


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The largest norm of a difference in the prompt, over that of the logits."""
    return float(np.linalg.norm(one[0] - other[0]) / np.linalg.norm(other[0]))


def test_an_adapter_does_what_merged_weights_do(adapters: list[Path], tmp_path: Path) -> None:
    recording = ("--level", "detailed", "--log", tmp_path / "a.log")
    base = logits(tmp_path / "base.npz", DEMO)
    merged = write_merged(tmp_path / "merged.gguf", DEMO, adapters[0], 0.5)
    expected = logits(tmp_path / "merged.npz", merged)
    words = ("--lora", adapters[0], "--scale", 0.5)
    got = logits(tmp_path / "lora.npz", DEMO, *words, *recording)
    assert distance(got, base) > 0.1, "it changes something"
    assert distance(got, expected) < 0.002, "rounding to F16"


def test_an_adapter_of_scale_zero_does_nothing(adapters: list[Path], tmp_path: Path) -> None:
    recording = ("--level", "detailed", "--log", tmp_path / "a.log")
    base = logits(tmp_path / "base.npz", DEMO)
    got = logits(tmp_path / "got.npz", DEMO, "--lora", adapters[0], "--scale", 0, *recording)
    assert [of.tobytes() for of in got] == [of.tobytes() for of in base]
    assert read_events(tmp_path / "a.log", "adapters") == []


@contextmanager
def context(model: Any) -> Iterator[Any]:
    params = api.llama_context_default_params()
    params.n_ctx, params.n_threads = 64, 1
    made = api.llama_init_from_model(model, params)
    yield made
    api.llama_free(made)


@contextmanager
def loaded(*adapters: Path) -> Iterator[tuple[Any, list[Any]]]:
    model = api.llama_model_load_from_file(bytes(DEMO), api.llama_model_default_params())
    yield model, [api.llama_adapter_lora_init(model, bytes(path)) for path in adapters]
    api.llama_model_free(model)


def use(ctx: Any, *adapters: tuple[Any, float]) -> None:
    n = len(adapters)
    handles = (api.llama_adapter_lora_p_ctypes * n)(*(handle for handle, _ in adapters))
    api.llama_set_adapters_lora(ctx, handles, n, (ctypes.c_float * n)(*(s for _, s in adapters)))


def decode(ctx: Any) -> None:
    assert api.llama_decode(ctx, api.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)) == 0


def entry_of(path: Path, scale: float) -> dict[str, Any]:
    """What the log must have about an adapter, by gguf-py."""
    reader = gguf.GGUFReader(path)
    alpha = reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
    b = [tensor for tensor in reader.tensors if tensor.name.endswith(".lora_b")]
    return {
        "file": path.name,
        "name": reader.fields["general.name"].contents(),
        "rank": int(b[0].shape[0]),
        "n_weights": len(b),
        "bytes": sum(tensor.n_bytes for tensor in reader.tensors),
        "alpha": alpha,
        "scale": scale,
    }


def test_the_adapters_of_a_context_are_those_that_were_set(
    adapters: list[Path], tmp_path: Path
) -> None:
    """Each change is one event; setting the same again, or with a scale of 0, is none."""
    with loaded(*adapters) as (model, (one, two)), context(model) as first:
        use(first, (one, 0.5))  # before the session
        with llamacpp_instr.record(tmp_path / "a.log"):
            decode(first)
            with context(model) as second:
                decode(second)
                use(second, (two, 1), (one, -2))
                use(second, (one, -2), (two, 1))
                use(second, (one, -2), (two, 0))
                decode(second)
                use(second)
                use(second)
    events = read_events(tmp_path / "a.log", "adapters")
    assert [(event["ctx"], event["adapters"]) for event in events] == [
        (0, [entry_of(adapters[0], 0.5)]),
        (1, [entry_of(adapters[0], -2), entry_of(adapters[1], 1)]),
        (1, [entry_of(adapters[0], -2)]),
        (1, []),
    ]
    steps = [event["t"] for event in read_events(tmp_path / "a.log", "step_begin")]
    times = [event["t"] for event in events]
    assert steps[1] < times[1] < times[2] < steps[2] < times[3]
    assert list(check_log(tmp_path / "a.log")) == []


# decodes until the log has a second part
APPLICATION = """
import pathlib, sys, time
from tests.recording import test_adapters as of
with of.loaded(pathlib.Path(sys.argv[1])) as (model, (one,)), of.context(model) as ctx:
    of.use(ctx, (one, 0.5))
    for _ in range(200):
        for _ in range(50):
            of.decode(ctx)
        of.api.llama_memory_clear(of.api.llama_get_memory(ctx), False)
        time.sleep(0.15)
        if pathlib.Path("it.part2.log").exists():
            break
    of.decode(ctx)
"""


def test_every_part_of_a_rotated_log_has_them(
    adapters: list[Path], instr: Instr, tmp_path: Path
) -> None:
    words = ("--level", "verbose", "--rotate", "1MB", "--log", "it.log")
    done = instr("exec", *words, "--", sys.executable, "-c", APPLICATION, adapters[0])
    assert done.returncode == 0, done.stderr
    for part in ("it.log", "it.part2.log"):
        (event,) = read_events(tmp_path / part, "adapters")
        assert event["adapters"] == [entry_of(adapters[0], 0.5)]
        assert list(check_log(tmp_path / part)) == []


def test_an_adapter_that_no_path_names(adapters: list[Path], tmp_path: Path) -> None:
    """Nor does it get the name of one that was freed."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    with loaded() as (model, _), llamacpp_instr.record(tmp_path / "a.log"):
        for _ in range(20):
            api.llama_adapter_lora_free(api.llama_adapter_lora_init(model, bytes(adapters[0])))
        file = libc.fopen(bytes(adapters[1]), b"rb")
        unnamed = api.llama_adapter_lora_init_from_file_ptr(model, file)
        libc.fclose(file)
        with context(model) as ctx:
            use(ctx, (unnamed, float("inf")))
    (event,) = read_events(tmp_path / "a.log", "adapters")
    assert event["adapters"][0]["file"] == ""
    assert "scale" not in event["adapters"][0]


def test_its_kernels_are_a_block_of_their_own(adapters: list[Path], tmp_path: Path) -> None:
    """Two products, the scaling and the sum for each weight, as llama.cpp adds them to the graph
    (`build_lora_mm`); all other kernels are those of the model alone."""
    of_ops = []
    for scale in (0.0, 0.5):
        log = tmp_path / f"{scale}.log"
        recorded = llamacpp_instr.record(log)
        with loaded(adapters[0]) as (model, (one,)), recorded, context(model) as ctx:
            use(ctx, (one, scale))
            decode(ctx)
        session = load_session(log)
        (plan,) = session.plans
        kernels = session.kernels(plan)
        pairs = list(zip(kernels.block, kernels.label, kernels.weight, strict=True))
        of_ops.append(pairs)
    alone, adapted = of_ops
    added = [(label, weight) for block, label, weight in adapted if block == "adapter"]
    assert [of for of in adapted if of[0] != "adapter"] == alone
    n = LAYERS * len(ROLES)
    assert Counter(label for label, _ in added) == {"MUL_MAT f32": 2 * n, "SCALE": n, "ADD": n}
    file = {tensor.name for tensor in gguf.GGUFReader(adapters[0]).tensors}
    assert {weight for _, weight in added if weight} == file


def test_the_memory_of_a_context_names_their_bytes(adapters: list[Path], tmp_path: Path) -> None:
    """Each counts once, whatever its scales."""
    recorded = llamacpp_instr.record(tmp_path / "a.log")
    with loaded(*adapters) as (model, (one, two)), recorded, context(model) as ctx:
        for of in ([(one, 0.5)], [(one, 1.0), (two, 1)], [(two, 1)]):
            use(ctx, *of)
            decode(ctx)
    ((memory,),) = recorded_memory(load_session(tmp_path / "a.log")).values()
    tensors = [tensor for path in adapters[:2] for tensor in gguf.GGUFReader(path).tensors]
    assert memory.adapters == sum(int(tensor.n_bytes) for tensor in tensors) > 0
    assert memory.measured is not None
    report = memory_report(StoredModel("m", "", []), memory)
    assert report.figures["adapters"] == (memory.adapters, "bytes")
    assert any("LoRA adapters" in note for note in report.notes)


def test_the_summary_names_it_and_its_share(adapters: list[Path], tmp_path: Path) -> None:
    recorded = llamacpp_instr.record(tmp_path / "a.log")
    with loaded(*adapters) as (model, (one, two)), recorded, context(model) as ctx:
        use(ctx, (one, 0.5), (two, 1))
        decode(ctx)
    session = load_session(tmp_path / "a.log")
    reports = {report.title: report for report in compute_summary(session)}
    named = [row[1] for row in reports["Session"].rows if row[0] == "adapter"]
    assert named == [
        "one.gguf (Adapter 1), rank 8, alpha 16, scale 0.5",
        "two.gguf (Adapter 2), rank 4, scale 1",
    ]
    (row,) = [row for row in reports["Where the time went"].rows if row[0] == "adapter"]
    (ops,) = session.ops
    is_added = np.array([block == "adapter" for block in session.kernels(ops.plan).block])
    step = session.steps["end"][0] - session.steps["begin"][0]
    assert row[1] == int(ops.dur[0][is_added].sum())
    assert row[2] == pytest.approx(row[1] / int(step))
