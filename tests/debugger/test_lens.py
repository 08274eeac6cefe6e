"""The logit lens after the last layer is the model's own answer; after others, that of a model
without the layers that follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.changes import AblatedLayer
from llamacpp_instr.debugger.residual import Guess, Lens
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.log.check import check_log
from tests.kit.debugger_kit import opened, run
from tests.kit.native_kit import DEMO, random_model
from tests.kit.quantized_kit import quantized_demo

pytestmark = pytest.mark.native

ARCHITECTURES = (
    "llama-dense", "llama4-moe", "gemma2-dense", "gemma3-dense", "gpt2-dense", "gpt-oss-moe",
    "qwen3moe-moe", "qwen35-dense", "phi2-dense", "falcon-dense", "bloom-dense", "mpt-dense",
    "mamba2-dense", "jamba-dense", "deepseek2-moe", "lfm2-dense", "olmo2-dense", "cohere2-dense",
    "granitemoe-moe", "nemotron_h-dense", "grok-moe", "plamo3-dense", "minicpm3-dense", "rnd1-moe",
)  # fmt: skip


def look(
    model: Path, log: Path, place: str, token: int = -1, **how: object
) -> tuple[list[list[Guess]], list[np.ndarray]]:
    """What the lens shows at each stop there, and the logits of each step."""
    lens = Lens()
    shown: list[list[Guess]] = []

    def on_stop(stop: Stop) -> None:
        shown.append(lens.look(stop, token))

    with opened(model) as loaded:
        done = run(loaded, log, followers=[lens], breakpoints=[place], on_stop=on_stop, **how)
    lens.close()
    return shown, done.logits


def relative_error(guess: np.ndarray, logits: np.ndarray) -> float:
    return float(np.abs(guess - logits).max() / np.abs(logits).max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_the_last_layer_it_shows_the_logits(architecture: str, tmp_path: Path) -> None:
    lens = Lens()
    shown: list[list[Guess]] = []

    class AtTheEnd:
        """Looks after the last op, whatever its name is."""

        def wants(self, graph: object, _ubatch: object) -> list[int]:
            return [len(graph) - 1]  # type: ignore[arg-type]

        def passed(self, stop: Stop) -> None:
            shown.append(lens.look(stop))

    with opened(random_model(architecture)) as model:
        logits = run(model, tmp_path / "log", followers=[lens, AtTheEnd()]).logits
    lens.close()
    assert len(shown) == len(logits) == 3
    for guesses, truth in zip(shown, logits, strict=True):
        last = guesses[-1]
        assert relative_error(last.logits, truth) < 1e-3
        assert [token for token, _ in last.top(10)] == top(truth)
        assert len(guesses) >= 2


def top(logits: np.ndarray) -> list[int]:
    return [int(token) for token in np.argsort(-logits, kind="stable")[:10]]


@pytest.mark.parametrize("file_type", ["F16", "Q8_0", "Q4_K_M", "Q4_0", "IQ2_XXS"])
def test_it_multiplies_weights_of_every_kind_as_the_model_does(
    file_type: str, tmp_path: Path
) -> None:
    """Including those that ggml has repacked for this CPU."""
    model = DEMO if file_type == "F16" else quantized_demo(file_type)
    shown, logits = look(model, tmp_path / "log", "result_output")
    for guesses, truth in zip(shown, logits, strict=True):
        assert np.array_equal(guesses[-1].logits, truth)


def test_a_layer_earlier_it_shows_what_the_model_says_without_its_last_layer(
    tmp_path: Path,
) -> None:
    shown, _ = look(DEMO, tmp_path / "log", "result_output", decodes=0)
    with opened(DEMO) as model:
        without = run(
            model, tmp_path / "log", decodes=0,
            followers=lambda debugging: [AblatedLayer(3, debugging.recording.note)],
        )  # fmt: skip
    assert np.array_equal(shown[0][2].logits, without.logits[0])
    assert not np.array_equal(shown[0][3].logits, without.logits[0])


def test_it_shows_the_layers_computed_so_far(tmp_path: Path) -> None:
    shown, _ = look(DEMO, tmp_path / "log", "ffn_out-2", decodes=0)
    assert [guess.layer for guess in shown[0]] == [0, 1]
    best, probability = shown[0][0].top(1)[0]
    assert 0 <= best < 1024
    assert 0 < probability <= 1


def test_looking_changes_no_logit_and_leaves_a_clean_log(tmp_path: Path) -> None:
    """What it computes is not recorded as the model's."""
    _, logits = look(DEMO, tmp_path / "log", "l_out-*", threads=2)
    with opened(DEMO) as model:
        plain = run(model, threads=2).logits
    assert all(np.array_equal(a, b) for a, b in zip(logits, plain, strict=True))
    assert list(check_log(tmp_path / "log")) == []


def test_it_shows_any_token_of_a_prompt_without_its_logits(tmp_path: Path) -> None:
    """All tokens but the last leave the last layer without an answer; before it they have one."""
    early, _ = look(DEMO, tmp_path / "log", "result_output", token=4, decodes=0)
    assert [guess.layer for guess in early[0]] == [0, 1, 2]
    all_of_them, _ = look(
        DEMO, tmp_path / "log", "result_output", token=4, decodes=0, all_logits=True
    )
    assert [guess.layer for guess in all_of_them[0]] == [0, 1, 2, 3]
    # ggml multiplies one row and twenty in different orders
    assert relative_error(early[0][2].logits, all_of_them[0][2].logits) < 1e-5


def test_a_ubatch_that_wants_no_logits_can_be_looked_at(tmp_path: Path) -> None:
    shown, _ = look(DEMO, tmp_path / "log", "attn_out-3", decodes=0, ubatch=8)
    assert [[guess.layer for guess in guesses] for guesses in shown] == [[0, 1, 2]] * 3
    whole, _ = look(DEMO, tmp_path / "log", "attn_out-3", token=7, decodes=0)
    assert top(shown[0][2].logits) == top(whole[0][2].logits)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("hy_v4-moe", "layer 0 does not end in one node"),
        ("talkie-dense", "layer 0 does not end in one node"),
        ("deepseek4-moe", "several rows for a token"),
    ],
)
def test_an_architecture_without_one_stream_is_refused_in_one_line(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        look(random_model(architecture), tmp_path / "log", "result_output")
    assert "\n" not in str(error.value)


def test_a_token_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no token 99"):
        look(DEMO, tmp_path / "log", "result_output", token=99)
    with pytest.raises(UsageError, match="no layer is complete yet"):
        look(DEMO, tmp_path / "log", "ffn_out-0")
