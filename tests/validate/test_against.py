"""What `instr validate --reference` does without transformers: llama.cpp's states, the comparison
of two sets of states, and wrong input. With transformers: tests/parts/peers/test_against.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli import main
from llamacpp_instr.converters.validate.against import (
    States,
    compare,
    compute_states,
    default_bound,
    judge_states,
)
from llamacpp_instr.converters.validate.live import prompt_tokens
from llamacpp_instr.converters.validate.worker import check_sizes
from llamacpp_instr.model.file import load_model_file
from tests.kit.debugger_kit import opened, run, without
from tests.kit.native_kit import DEMO, random_model
from tests.kit.quantized_kit import quantized_demo

BOUND = 1e-6


def states_of(path: Path) -> States:
    with opened(path) as model:
        return compute_states(model, prompt_tokens(model, None), 1, "off")


@pytest.fixture(scope="module")
def demo() -> States:
    return states_of(DEMO)


@pytest.mark.native
def test_the_states_are_those_of_the_graph(demo: States) -> None:
    layers = [f"layer {n}" for n in range(4)]
    assert list(demo.values) == ["embeddings", *layers, "final norm", "logits"]
    assert [demo.nodes[name] for name in layers] == [f"l_out-{n}" for n in range(4)]
    with opened(DEMO) as model:
        tokens = prompt_tokens(model, None)
        (logits,) = run(model, prompt=tokens, decodes=0, flash_attn="off").logits
        weights = load_model_file(DEMO).by_name
        assert demo.values["embeddings"].shape == (len(tokens), weights["token_embd.weight"].ne[0])
    # that run has a cache in F16
    np.testing.assert_allclose(demo.values["logits"][-1], logits, atol=0.02)


@pytest.mark.native
@pytest.mark.parametrize(
    ("weight", "state"),
    [
        ("token_embd.weight", "embeddings"),
        ("blk.0.ffn_down.weight", "layer 0"),
        ("blk.3.attn_norm.weight", "layer 3"),
        ("blk.2.ffn_norm.weight", "layer 2"),
        ("output_norm.weight", "final norm"),
    ],
)
def test_the_first_state_that_differs_is_named(
    weight: str, state: str, demo: States, tmp_path: Path
) -> None:
    damaged = states_of(without(DEMO, [weight], tmp_path / "damaged.gguf"))
    verdict = judge_states(compare(damaged.values, demo.values, damaged.nodes), BOUND, "--bound")
    assert not verdict.passed
    assert verdict.reports[0].figures["parts at"] == (state, "text")
    assert verdict.reports[0].notes[0] == (
        f"They diverge at {state}: its error is the first beyond 1e-06 (--bound)."
    )


def test_the_errors_are_relative_and_of_the_worst_token() -> None:
    theirs = np.eye(3, dtype=np.float32)
    ours = theirs.copy()
    ours[1, 2] = 2.0  # an angle whose cosine is 1/sqrt(5)
    (of,) = compare({"logits": ours}, {"logits": theirs}, {"logits": "result_output"}).states
    assert of.error == pytest.approx(2 / np.sqrt(3))
    assert of.cosine == pytest.approx(1 / np.sqrt(5))
    assert of.token == 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_beyond_any_bound(wrong: float) -> None:
    theirs = np.eye(3, dtype=np.float32)
    ours = theirs.copy()
    ours[2, 0] = wrong
    found = compare({"logits": ours}, {"logits": theirs}, {"logits": "result_output"})
    assert found.states[0].error == np.inf
    assert found.states[0].token == 2
    assert not judge_states(found, 1e9, "--bound").passed


@pytest.mark.native
def test_the_coarsest_matrix_decides_the_default_bound() -> None:
    assert default_bound(load_model_file(DEMO))[0] == 16 / 2**11
    assert default_bound(load_model_file(quantized_demo("Q8_0")))[0] == 16 / 2**8
    assert default_bound(load_model_file(quantized_demo("Q4_K_M")))[0] == 0.5


@pytest.mark.parametrize(
    ("size", "line"),
    [
        ({"vocab_size": 600}, "it.gguf has 512 tokens in its vocabulary, but folder has 600"),
        ({"num_hidden_layers": 3}, "it.gguf has 2 layers, but folder has 3"),
        ({"hidden_size": None}, "it.gguf has 64 values in a hidden state, but folder has none"),
    ],
)
def test_another_model_is_refused_with_both_numbers(size: dict[str, int], line: str) -> None:
    same = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}
    sizes = {"path": "it.gguf", "n_layers": 2, "width": 64, "n_vocab": 512}
    check_sizes("folder", SimpleNamespace(**same), sizes)
    with pytest.raises(UsageError, match=line):
        check_sizes("folder", SimpleNamespace(**same | size), sizes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"it": np.zeros(1, np.float32)}, made / "model.safetensors")
    return made


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--bound 0.1", "--bound is for --reference; the tolerances of ops are upstream's"),
        (
            "--reference model -n 3",
            "-n is the number of decodes; --reference compares a prefill only",
        ),
        ("--reference nothing", "nothing does not exist"),
        ("--reference model/config.json", "model/config.json is a file; name the folder"),
        ("--reference empty", "empty is not a model: it has no config.json"),
        ("--reference unweighted", "unweighted has no weights"),
        (
            "--reference meta",
            "meta is a model in Meta's own layout; --reference needs a Hugging Face",
        ),
        ("--reference model -o model/config.json --force", "would overwrite the input"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    for name in ("empty", "unweighted", "meta"):
        Path(name).mkdir()
    shutil.copyfile(folder / "config.json", "unweighted/config.json")
    for name in ("params.json", "consolidated.00.pth", "tokenizer.model"):
        Path("meta", name).write_text("{}")
    done = CliRunner().invoke(main, ["validate", "demo", *arguments.split()])
    assert line in done.stderr
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.native
def test_a_model_without_one_residual_stream_is_refused() -> None:
    model = random_model("deepseek4-moe")
    with pytest.raises(UsageError, match="one row for each token"):
        states_of(model)
