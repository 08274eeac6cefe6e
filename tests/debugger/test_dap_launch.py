"""A launch configuration: what it means, and what is refused before anything is loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.dap.adapter import Adapter
from llamacpp_instr.run.debugging import configured, in_keys, launch
from llamacpp_instr.run.session import RunOptions


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(*named: str, **keys: Any) -> RunOptions:
    """The options of a run that was launched; `named` are the model and the prompt of the command
    line."""
    model, prompt = (*named, None)[:2] if named else ("demo", None)
    launch(model, prompt, keys, Adapter(print, partial(launch, model, prompt)))
    return configured(model, prompt, keys)[1]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "no prompt is given"),
        ({"prompt": "a", "model": "absent.gguf"}, "absent.gguf does not exist"),
        ({"prompt": "a", "ctx": 0}, '"ctx" is 0; it must be from 1'),
        ({"prompt": "a", "n": -1}, '"n" is -1; it must be 0 or more'),
        ({"prompt": "a", "level": "all"}, "level 'all' is not one of minimal, detailed, verbose"),
        ({"prompt": "a", "topK": 5}, '"topK" has no effect on greedy sampling; add "temp"'),
        ({"prompt": "a", "n": "many"}, "launch: n: Expected int, got str"),
        ({"prompt": "a", "cacheTypeK": "q9"}, "\"cacheTypeK\" 'q9' is not one of"),
        ({"promtp": "a"}, "'promtp' is not a key; did you mean 'prompt'"),
        ({"prompt": "a", "log": "-"}, "the log must be a file"),
        ({"prompt": "a", "log": "absent/x.log"}, "absent does not exist"),
    ],
)
def test_a_wrong_configuration_is_one_line(keys: dict[str, Any], why: str, place: Path) -> None:
    with pytest.raises(UsageError) as refused:
        prepared(**keys)
    message = in_keys(str(refused.value))
    assert why in message
    assert "\n" not in message
    assert list(place.iterdir()) == []


def test_what_is_missing_comes_from_the_command_line() -> None:
    options = prepared(prompt="a")
    assert (options.model, options.prompts) == ("demo", ["a"])
    options = prepared("absent.gguf", "a", model="demo", prompt="b")
    assert (options.model, options.prompts) == ("demo", ["b"])


def test_keys_of_the_editor_are_ignored() -> None:
    own = {"type": "llamacpp-instr", "request": "launch", "name": "a", "__sessionId": "1"}
    assert prepared(prompt="a", **own, presentation={"hidden": False}).prompts == ["a"]


def test_options_are_those_of_the_command_line() -> None:
    keys = {"temp": 0.5, "topK": 3, "seed": 1, "ctx": 64, "cacheTypeV": "q8_0", "flashAttn": "on"}
    options = prepared(prompt="a", **keys, mmap=False, n=7)
    assert (options.sampling.temp, options.sampling.top_k, options.sampling.seed) == (0.5, 3, 1)
    assert (options.context.ctx, options.context.cache_type_v) == (64, "q8_0")
    assert (options.context.flash_attn, options.mmap, options.n) == ("on", False, 7)


def test_an_existing_log_is_kept_unless_forced(place: Path) -> None:
    (place / "debug.log").write_text("mine")
    assert prepared(prompt="a").log == Path("debug-2.log")
    with pytest.raises(UsageError, match='use "force": true to overwrite it'):
        prepared(prompt="a", log="debug.log")
    with pytest.raises(UsageError, match="is not a log, so it is not overwritten"):
        prepared(prompt="a", force=True)
