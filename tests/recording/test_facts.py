"""What a log says of the session, the host, models, weights and contexts is what the kernel,
gguf-py and llama.cpp say."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import llamacpp_instr
from llamacpp_instr.base.cpus import cpu_name
from llamacpp_instr.llama import native
from llamacpp_instr.llama.build.source_tree import patch_digest, patches_dir, read_upstream
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.schema import SCHEMA_VERSION
from tests.conftest import read_events
from tests.kit.native_kit import DEMO, ROOT, random_model
from tests.kit.programs import run_python

pytestmark = pytest.mark.native
api = pytest.importorskip("llama_cpp.llama_cpp")  # tests of other files need no `instr build`
memory_truth = pytest.importorskip("tests.kit.memory_truth")

Span = tuple[int, int]
HELD = 64 << 20
"""bytes of memory that the process holds"""
WARNING, ERROR = 3, 4
"""ggml_log_level"""

CONTEXTS = (
    {
        "n_ctx": 512, "n_batch": 256, "n_ubatch": 128, "n_seq_max": 2, "n_threads": 1,
        "n_threads_batch": 2, "type_k": gguf.GGMLQuantizationType.Q8_0.value,
        "type_v": gguf.GGMLQuantizationType.F16.value, "flash_attn_type": 1, "kv_unified": True,
        "offload_kqv": True, "embeddings": False, "attention_type": 0,
    },
    {
        "n_ctx": 4096, "n_batch": 64, "n_ubatch": 32, "n_seq_max": 4, "n_threads": 2,
        "n_threads_batch": 1, "type_k": gguf.GGMLQuantizationType.F16.value,
        "type_v": gguf.GGMLQuantizationType.F32.value, "flash_attn_type": 0, "kv_unified": False,
        "offload_kqv": False, "embeddings": True, "attention_type": 1,
    },
)  # fmt: skip
"""settings that differ in everything"""


@contextmanager
def timed(spans: dict[str, Span], name: str) -> Iterator[None]:
    """Keeps CLOCK_MONOTONIC before and after the block."""
    begin = time.monotonic_ns()
    yield
    spans[name] = (begin, time.monotonic_ns())


@contextmanager
def messages() -> Iterator[list[tuple[int, str]]]:
    """What llama.cpp tells its log callback meanwhile: level and text."""
    received: list[tuple[int, str]] = []
    receive = api.llama_log_callback(lambda level, text, _: received.append((level, text.decode())))
    before, data = api.llama_log_callback(), ctypes.c_void_p()
    api.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    api.llama_log_set(receive, None)
    yield received
    api.llama_log_set(before, data)


@dataclass
class Facts:
    log: Path
    spans: dict[str, Span]
    wall: Span
    received: list[tuple[int, str]]
    api: list[dict[str, Any]]
    """of every context"""
    model: dict[str, Any]
    tokens: list[int]

    def one(self, event: str) -> dict[str, Any]:
        (found,) = read_events(self.log, event)
        return found


def opened(path: Path) -> Any:
    return api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())


def context_of(model: Any, settings: dict[str, Any]) -> Any:
    params = api.llama_context_default_params()
    for name, value in settings.items():
        setattr(params, name, value)
    return api.llama_init_from_model(model, params)


def asked(context: Any) -> dict[str, int]:
    names = ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max", "n_threads")
    values = {name: getattr(api, f"llama_{name}")(context) for name in names}
    return {**values, "n_threads_batch": api.llama_n_threads_batch(context)}


def described(model: Any) -> dict[str, Any]:
    text = ctypes.create_string_buffer(256)
    api.llama_model_desc(model, text, 256)
    return {
        "description": text.value.decode(),
        "params": api.llama_model_n_params(model),
        "bytes": api.llama_model_size(model),
        "ftype": api.llama_ftype_name(api.llama_model_ftype(model)).decode(),
    }


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    log = tmp_path_factory.mktemp("facts") / "a.log"
    held = np.ones(HELD, np.uint8)
    spans: dict[str, Span] = {}
    api.llama_backend_init()
    wall = time.time_ns()
    with messages() as received:
        with timed(spans, "begin"):
            session = llamacpp_instr.record(log, level="verbose")
        walls = (wall, time.time_ns())
        with timed(spans, "load"):
            model = opened(DEMO)
        contexts = []
        for number, settings in enumerate(CONTEXTS):
            with timed(spans, f"context {number}"):
                contexts.append(context_of(model, settings))
        token = (ctypes.c_int32 * 1)(7)
        sampler = api.llama_sampler_init_greedy()
        tokens = []
        for context in contexts:
            with timed(spans, "decode"):
                assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0
            tokens.append(api.llama_sampler_sample(sampler, context, -1))
        token[0] = 10**6  # not in the vocabulary
        with timed(spans, "error"):
            assert api.llama_decode(contexts[0], api.llama_batch_get_one(token, 1)) == -1
        facts = Facts(
            log, spans, walls, received, [*map(asked, contexts)], described(model), tokens
        )
        with timed(spans, "note"):
            session.note("a", 1)
        for context in contexts:
            api.llama_free(context)
        api.llama_model_free(model)
        with timed(spans, "end"):
            session.close()
    assert list(check_log(log)) == []
    yield facts
    del held


def inside(t: int, span: Span) -> bool:
    return span[0] <= t <= span[1]


def test_the_first_and_the_last_line(facts: Facts) -> None:
    start, end = read_events(facts.log)[0], read_events(facts.log)[-1]
    assert inside(start["t"], facts.spans["begin"])
    assert inside(start["wall"], facts.wall)
    second = datetime.fromtimestamp(start["wall"] // 10**9, timezone.utc)
    assert start["time"] == f"{second:%Y-%m-%dT%H:%M:%S}.{start['wall'] % 10**9:09d}Z"
    assert start["schema"] == SCHEMA_VERSION
    assert re.fullmatch("[0-9a-f]{16}", start["id"])
    assert "perturbed" not in start
    lines = facts.log.read_bytes().splitlines(keepends=True)
    assert end["bytes"] == sum(map(len, lines[:-1]))
    assert end["events"] == Counter(event["event"] for event in read_events(facts.log)[:-1])
    assert inside(end["t"], facts.spans["end"])
    assert end["reason"] == "closed"
    assert end["dropped"] == end["dropped_ops"] == 0


def test_the_clock_is_the_counter_if_the_kernel_trusts_it(facts: Facts) -> None:
    sources = Path("/sys/devices/system/clocksource/clocksource0/available_clocksource")
    constant = "constant_tsc" in cpu_info("flags") and "nonstop_tsc" in cpu_info("flags")
    trusted = sources.exists() and "tsc" in sources.read_text().split()
    clock = {"x86_64": "tsc" if constant and trusted else "monotonic", "aarch64": "cntvct"}
    start = facts.one("session_start")
    assert start["clock"] == clock[platform.machine()]
    assert ("tick" in start) == (platform.machine() == "aarch64")


def cpu_info(key: str) -> str:
    found = re.search(rf"^{key}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else ""


def test_the_producer_the_host_and_the_process(facts: Facts) -> None:
    start, upstream = facts.one("session_start"), read_upstream(patches_dir())
    assert start["producer"] == {
        "llama_cpp": upstream.wheel_version,
        "commit": upstream.commit,
        "patches": patch_digest(patches_dir()),
        "abi": native.ABI,
    }
    memory = re.search(r"^MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert memory
    on = re.findall(r"(\w+) = (\d+)", api.llama_print_system_info().decode())
    assert start["host"] == {
        "cpu": cpu_info("model name") or cpu_name(),
        "features": [
            name if value == "1" else f"{name}={value}" for name, value in on if value != "0"
        ],
        "cores": os.sysconf("SC_NPROCESSORS_ONLN"),
        "memory": int(memory[1]) * 1024,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    argv = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    assert start["process"]["pid"] == os.getpid()
    assert len(start["process"]["argv"]) == len(argv)


@pytest.mark.parametrize("level", ["minimal", "detailed", "verbose"])
def test_what_disturbs_the_times_is_recorded(level: str, tmp_path: Path) -> None:
    library = native.load()
    for number, (stats, flags) in enumerate([(None, 0), ("^x", 0), (None, native.DEBUGGED)]):
        log = tmp_path / f"{number}.log"
        assert library.begin(bytes(log), level, "", stats, flags) == 0
        assert library.end() == 0
        start = read_events(log, "session_start")[0]
        assert start["level"] == level
        assert start.get("perturbed", False) == bool(stats or flags)


def test_the_environment_says_what_is_recorded(tmp_path: Path) -> None:
    """As `instr exec` sets it; a session that the program cannot open changes nothing."""
    asked = {
        "LLAMA_INSTR_LOG": str(tmp_path / "%p.log"), "LLAMA_INSTR_LEVEL": "minimal",
        "LLAMA_INSTR_ARGS": '{"a": 1}', "LLAMA_INSTR_STATS": "^l_out-1$",
    }  # fmt: skip
    code = """
        import os, sys
        from llamacpp_instr.llama import native
        from tests.kit.decoder import Decoder
        assert native.load().begin(b"/none/a.log", "verbose", "", None, 0) < 0
        Decoder(sys.argv[1]).decode({0: [1]})
        print(os.getpid())
    """
    done = run_python(code, DEMO, cwd=ROOT, env={**os.environ, **asked}, check=True)
    log = tmp_path / f"{done.stdout.strip()}.log"
    start, end = read_events(log)[0], read_events(log)[-1]
    assert (start["level"], start["args"], start["perturbed"]) == ("minimal", {"a": 1}, True)
    assert [event["name"] for event in read_events(log, "tensor_stats")] == ["l_out-1"]
    assert end["reason"] == "exit"


def test_a_model_is_what_llama_cpp_says(facts: Facts) -> None:
    model, reader = facts.one("model"), gguf.GGUFReader(DEMO)
    begin, end = facts.spans["load"]
    assert begin <= model["t"] <= model["t"] + model["dur"] <= end
    weights = facts.log.read_text().index('"event":"tensor"')
    assert weights > facts.log.read_text().index('"event":"model"')
    # loading ends before its weights are written
    assert model["t"] + model["dur"] <= read_events(facts.log, "tensor")[0]["t"]
    assert {key: model[key] for key in facts.model} == facts.model
    assert model["path"] == str(DEMO)
    for key in ("architecture", "name"):
        value = model["arch" if key == "architecture" else key]
        assert value == reader.fields[f"general.{key}"].contents()
    assert model["n_tensors"] == len(reader.tensors)


def test_weights_are_those_of_the_file(facts: Facts) -> None:
    tensors = read_events(facts.log, "tensor")
    in_file = {tensor.name: tensor for tensor in gguf.GGUFReader(DEMO).tensors}
    assert [tensor["tensor"] for tensor in tensors] == list(range(len(in_file)))
    assert {tensor["name"] for tensor in tensors} == set(in_file)
    by_buffer: dict[str, float] = defaultdict(float)
    for tensor in tensors:
        expected = in_file[tensor["name"]]
        assert tensor["model"] == 0
        assert tensor["type"] == expected.tensor_type.name.lower()
        assert tensor["ne"] == expected.shape.tolist()
        assert tensor["bytes"] == expected.n_bytes
        block = re.match(r"blk\.(\d+)\.", tensor["name"])
        assert tensor.get("layer", -1) == (int(block[1]) if block else -1)
        assert inside(tensor["t"], facts.spans["load"])
        by_buffer[tensor["buffer"]] += tensor["bytes"] / 2**20
    sizes = memory_truth.buffers([text for _, text in facts.received])["weights"]
    assert by_buffer == pytest.approx(sizes, abs=0.02)


HPARAMS = {
    "n_ctx_train": "context_length", "n_layer": "block_count", "n_embd": "embedding_length",
    "n_head": "attention.head_count", "n_head_kv": "attention.head_count_kv",
    "n_embd_head_k": "attention.key_length", "n_embd_head_v": "attention.value_length",
    "n_rot": "rope.dimension_count", "n_ff": "feed_forward_length",
    "n_swa": "attention.sliding_window", "n_expert": "expert_count",
    "n_expert_used": "expert_used_count", "rope_freq_base": "rope.freq_base",
    "norm_rms_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
"""and their keys in a file"""
HPARAMS_OF = ("llama-dense", "llama-moe", "gemma3-dense", "qwen3-dense", "deepseek2-moe")


def test_hyper_parameters_are_those_of_the_file(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    random = (random_model(name) for name in HPARAMS_OF)
    for path in (DEMO, *random):
        with llamacpp_instr.record(tmp_path / f"{path.stem}.log"):
            model = opened(path)
        hparams = read_events(tmp_path / f"{path.stem}.log", "model")[0]["hparams"]
        calls: dict[str, Callable[[Any], int]] = {
            "n_ctx_train": api.llama_model_n_ctx_train, "n_layer": api.llama_model_n_layer,
            "n_embd": api.llama_model_n_embd, "n_head": api.llama_model_n_head,
            "n_head_kv": api.llama_model_n_head_kv, "n_swa": api.llama_model_n_swa,
        }  # fmt: skip
        assert {name: hparams[name] for name in calls} == {
            name: call(model) for name, call in calls.items()
        }, path
        vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        assert hparams["n_vocab"] == vocabulary
        api.llama_model_free(model)
        fields = gguf.GGUFReader(path).fields
        arch = fields["general.architecture"].contents()
        for name, key in HPARAMS.items():
            if (field := fields.get(f"{arch}.{key}")) and isinstance(field.contents(), int | float):
                assert hparams[name] == pytest.approx(field.contents(), rel=1e-6), (path, name)
                found[name] += field.contents() != 0
        assert set(hparams) == {"n_vocab", *HPARAMS}
    assert set(found) == set(HPARAMS), "each has a value in some file"


def test_contexts_are_what_llama_cpp_says(facts: Facts) -> None:
    contexts = read_events(facts.log, "context")
    for number, (context, settings) in enumerate(zip(contexts, CONTEXTS, strict=True)):
        assert inside(context["t"], facts.spans[f"context {number}"])
        assert {key: context[key] for key in facts.api[number]} == facts.api[number]
        types = gguf.GGMLQuantizationType
        assert {key: value for key, value in context.items() if key not in facts.api[number]} == {
            "event": "context", "t": context["t"], "ctx": number, "model": 0,
            "type_k": types(settings["type_k"]).name.lower(),
            "type_v": types(settings["type_v"]).name.lower(),
            "flash_attn": settings["flash_attn_type"] == 1,
            "causal": settings["attention_type"] == 0, "embeddings": settings["embeddings"],
            "kv_unified": settings["kv_unified"], "offload_kqv": settings["offload_kqv"],
            "backends": ["CPU"],
        }  # fmt: skip


def test_the_memory_of_contexts_is_what_llama_cpp_prints(facts: Facts) -> None:
    memory = read_events(facts.log, "memory")
    peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak
    printed = "".join(text for _, text in facts.received)
    of_contexts = printed.split("llama_context: constructing llama_context\n")
    weights = memory_truth.buffers([of_contexts[0]])["weights"]
    for number, text in enumerate(of_contexts[1:]):
        written = [event for event in memory if event["ctx"] == number]
        assert inside(written[0]["t"], facts.spans[f"context {number}"])
        sizes = memory_truth.buffers([text])
        for name, kind in (("model", "weights"), ("context", "cache"), ("compute", "compute")):
            expected = weights if kind == "weights" else sizes[kind]
            sums = {use["buffer"]: use[name] / 2**20 for use in written[0]["buffers"] if use[name]}
            assert sums == pytest.approx(expected, abs=0.02), name
        # Linux adds a CPU's pages to each of three counters in batches, and reads without the rest
        n_cpus = os.cpu_count() or 1
        unread = 3 * n_cpus * max(32, 2 * n_cpus) * os.sysconf("SC_PAGE_SIZE")
        assert all(HELD <= event["rss"] <= int(peak[1]) * 1024 + unread for event in written)


def test_messages_are_llama_cpps(facts: Facts) -> None:
    expected = [
        ("warn" if level == WARNING else "error", text.rstrip("\n"))
        for level, text in facts.received if level in (WARNING, ERROR)
    ]  # fmt: skip
    written = read_events(facts.log, "message")
    assert [(event["level"], event["text"]) for event in written] == expected
    assert {level for level, _ in expected} == {"warn", "error"}
    assert inside(written[-1]["t"], facts.spans["error"])


def test_marks_name_their_thread_and_notes_their_time(facts: Facts, tmp_path: Path) -> None:
    assert inside(facts.one("note")["t"], facts.spans["note"])
    with llamacpp_instr.record(tmp_path / "a.log") as session:
        thread = threading.Thread(target=session.instant, args=("x",))
        before = time.monotonic_ns()
        thread.start()
        thread.join()
        session.instant("y")
    there, here = read_events(tmp_path / "a.log", "mark")
    assert before <= there["t"] <= here["t"] <= time.monotonic_ns()
    assert (there["thread"], here["thread"]) == (thread.native_id, threading.get_native_id())
