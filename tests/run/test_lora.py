"""`instr run --lora`: what llama-cpp-python does with the same adapter, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Instr, assert_refused, read_events
from tests.kit.adapters import write_adapter
from tests.kit.native_kit import DEMO, open_llama

pytestmark = pytest.mark.native

PROMPT = "Once upon a time there was a little"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lora") / "it.gguf", DEMO)


def text_of(instr: Instr, *words: object) -> str:
    done = instr("run", "demo", "--threads", 1, "-p", PROMPT, "-n", 32, "--force", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_text_is_that_of_llama_cpp_python(instr: Instr, adapter: Path, scale: float) -> None:
    peer = open_llama(DEMO, n_ctx=512, lora_path=str(adapter), lora_scale=scale)
    done = peer.create_completion(PROMPT, max_tokens=32, temperature=0, top_k=1, repeat_penalty=1)
    peer.close()
    words = ("--lora", adapter if scale == 1 else f"{adapter}:{scale}")
    assert text_of(instr, *words) == done["choices"][0]["text"] + "\n" != text_of(instr)


def test_several_adapters_are_in_the_log_and_a_scale_of_zero_is_none(
    instr: Instr, adapter: Path, tmp_path: Path
) -> None:
    """Half of one and half of it again is all of it."""
    twice = text_of(instr, "--lora", f"{adapter}:0.5", "--lora", f"{adapter}:0.5")
    (event,) = read_events(tmp_path / "session.log", "adapters")
    assert [(of["file"], of["scale"]) for of in event["adapters"]] == [("it.gguf", 0.5)] * 2
    given = read_events(tmp_path / "session.log", "session_start")[0]["args"]["lora"]
    assert given == [{"path": str(adapter), "scale": 0.5}] * 2
    assert twice == text_of(instr, "--lora", adapter)
    assert text_of(instr, "--lora", f"{adapter}:0") == text_of(instr)
    assert read_events(tmp_path / "session.log", "adapters") == []


def test_embeddings_with_an_adapter(instr: Instr, adapter: Path) -> None:
    assert text_of(instr, "--embed", "--lora", adapter) != text_of(instr, "--embed")


def test_a_wrong_adapter_is_refused_before_anything_runs(
    instr: Instr, adapter: Path, models: Path, tmp_path: Path
) -> None:
    run = ("run", "demo", "-p", "Hi", "--log", "a.log", "--lora")
    assert_refused(instr(*run, "none.gguf"), "none.gguf does not exist")
    assert_refused(instr(*run, models / "llama.gguf"), "is not a LoRA adapter")
    assert_refused(instr(*run, f"{adapter}:nan"), "must be a finite number")
    assert_refused(instr(*run, adapter, "--lora", "b.gguf"), "b.gguf does not exist")
    assert_refused(instr("run", adapter, "-p", "Hi"), f"{adapter} is a LoRA adapter, not a model")
    small = write_adapter(tmp_path / "small.gguf", models / "llama.gguf")
    assert_refused(instr(*run, small), f"{small} does not fit", "must be 256 x 8")
    onto = ("run", "demo", "-p", "Hi", "--force", "--log", adapter, "--lora", adapter)
    assert_refused(instr(*onto), str(adapter))
    assert not (tmp_path / "a.log").exists()


def test_the_debugger_stops_in_an_adapter(instr: Instr, adapter: Path) -> None:
    words = ("--threads", 1, "-n", 2, "--break", "block=adapter layer=2")
    done = instr("debug", "demo", "-p", PROMPT, *words, "--lora", adapter, input="quit\n")
    assert "MUL_MAT(blk.2.attn_q.weight.lora_a, attn_norm-2)" in done.stderr
    assert "LoRA adapter of the query projection" in done.stderr
