"""`instr run --capture` writes the values of a whole run: whole shards, in bounded memory."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.capture import Capture, matching
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import TensorStats
from tests.conftest import Instr, start_run
from tests.kit.commands_kit import blocks_of
from tests.kit.debugger_kit import Run, opened, run
from tests.kit.native_kit import DEMO, ROOT, random_model
from tests.kit.programs import run_python

pytestmark = pytest.mark.native

RUN = ("run", "demo", "--prompt", "Once upon a time", "-n", 12)


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return found


def shards_of(folder: Path) -> list[Mapping[str, np.ndarray]]:
    """Every file that the index names; the folder has no other."""
    names = [shard["file"] for shard in index_of(folder)["shards"]]
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", *names]
    shards = [load_file(folder / name) for name in names]
    for shard, entry in zip(shards, index_of(folder)["shards"], strict=True):
        assert {name: list(values.shape) for name, values in shard.items()} == entry["tensors"]
    return shards


def captured(
    pattern: str, folder: Path, model: Path = DEMO, shard_bytes: int = 1 << 20, **how: Any
) -> tuple[list[Mapping[str, np.ndarray]], Run]:
    """The shards of a run, and what the model computed."""
    capture = Capture(pattern, folder, shard_bytes=shard_bytes)
    with opened(model) as loaded:
        done = run(loaded, folder.with_suffix(".log"), followers=[capture], **how)
    capture.close()
    return shards_of(folder), done


def test_a_row_for_each_token_of_the_prompt_and_of_the_answer(instr: Instr, tmp_path: Path) -> None:
    done = instr(*RUN, "--capture", "l_out-*", "-o", "act")
    assert done.returncode == 0, done.stderr
    assert "captured: act, 16 tokens" in done.stderr
    (shard,) = shards_of(tmp_path / "act")
    assert shard["positions"].tolist() == list(range(16))
    assert shard["steps"].tolist() == [0] * 5 + list(range(1, 12))
    assert shard["tokens"][:2].tolist() == [1, 668]  # <s>, Once
    assert shard["l_out-2"].shape == (16, 256)
    # the last layer computes only the tokens whose logits are wanted
    assert shard["outputs"].tolist() == list(range(4, 16))
    assert shard["l_out-3"].shape == (12, 256)
    assert index_of(tmp_path / "act")["rows_of_outputs"] == ["l_out-3"]


def test_the_values_are_those_that_stats_summarizes(instr: Instr, tmp_path: Path) -> None:
    assert instr(*RUN, "--capture", "ffn_out-*", "-o", "act", "--seed", 1).returncode == 0
    done = instr(*RUN, "--stats", "^ffn_out-", "--log", "stats.log", "--seed", 1)
    assert done.returncode == 0, done.stderr
    (shard,) = shards_of(tmp_path / "act")
    steps, of_outputs = shard["steps"], shard["outputs"]
    checked = 0
    for _, event in read_events(tmp_path / "stats.log"):
        if not isinstance(event, TensorStats):
            continue
        # each step of this run is one compute
        values = shard[event.name]
        rows = steps if len(values) == len(steps) else steps[of_outputs]
        mine = values[rows == event.compute].astype(np.float64)
        assert (mine.min(), mine.max()) == pytest.approx((event.min, event.max), rel=1e-6)
        assert mine.mean() == pytest.approx(event.mean, rel=1e-5, abs=1e-7)
        checked += 1
    assert checked == 4 * 12


def test_logits_computed_from_the_last_layer_are_the_models(tmp_path: Path) -> None:
    """numpy computes the output norm and the head from what was captured."""
    import gguf

    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(DEMO).tensors}
    (shard,), done = captured("l_out-3", tmp_path / "act")
    rows = shard["l_out-3"].astype(np.float64)
    normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5)
    logits = normed * weights["output_norm.weight"] @ weights["output.weight"].astype(float).T
    for mine, real in zip(logits, done.logits, strict=True):
        assert np.abs(mine - real).max() < 0.02 * np.abs(real).max()


def test_heads_stay_in_a_row_of_their_token(tmp_path: Path) -> None:
    four = [3, 10, 17, 24]  # as many tokens as some models have heads
    for architecture in ("llama-dense", "gemma2-dense"):
        model = random_model(architecture)
        (shard,), _ = captured("Qcur-*", tmp_path / architecture, model, prompt=four)
        rows = [values for name, values in shard.items() if name.startswith("Qcur-")]
        assert all(len(values) == 6 for values in rows)


def test_shards_together_are_the_one_shard_of_a_run(tmp_path: Path) -> None:
    (whole,), _ = captured("l_out-*", tmp_path / "one", decodes=5, ubatch=8)
    parts, _ = captured("l_out-*", tmp_path / "many", shard_bytes=1, decodes=5, ubatch=8)
    assert len(parts) == 8  # three ubatches of the prompt, five decodes
    starts = np.cumsum([0, *(len(part["tokens"]) for part in parts)])
    for name, values in whole.items():
        pieces = [part[name] for part in parts if name in part]
        if name == "outputs":
            pieces = [piece + start for piece, start in zip(pieces, starts, strict=False)]
        assert np.array_equal(np.concatenate(pieces), values)


def test_nodes_that_only_the_decoder_has_are_captured(models: Path, tmp_path: Path) -> None:
    (shard,), _ = captured("result_output", tmp_path / "act", models / "t5.gguf", decodes=2)
    assert len(shard["tokens"]) == len(shard["result_output"]) == 3


LONG = """
import resource, sys
from pathlib import Path
from llamacpp_instr.debugger.stop import debug
from llamacpp_instr.debugger.capture import Capture
from llamacpp_instr.llama.engine import ModelContext, ContextOptions
from tests.kit.commands_kit import blocks_of
from tests.kit.debugger_kit import opened

capture = Capture("*_out-*", Path("act"), shard_bytes=4 << 20)
with opened(Path(sys.argv[1])) as model, debug("log") as debugging:
    debugging.debugger.followers.append(capture)
    peaks = []
    with ModelContext(model, ContextOptions(ctx=256, threads=1)) as context:
        for _ in range(40):
            context.clear()
            context.decode([3] * 200)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
capture.close()
print(peaks[14], peaks[-1])
"""


def test_memory_is_bounded_by_a_shard(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run_python(LONG, DEMO, cwd=tmp_path, env=environment, check=True)
    written = sum(path.stat().st_size for path in (tmp_path / "act").iterdir())
    early, late = map(int, done.stdout.split())
    assert written > 60 << 20
    assert (late - early) << 10 < 16 << 20
    assert len(shards_of(tmp_path / "act")) >= 10


def test_ctrl_c_leaves_whole_shards_and_an_index(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    options = ("-n", 400, "--repeat", 1000, "--capture", "l_out-*", "-o", "act")
    process = start_run(environment, tmp_path, "demo", "--prompt", "Once", *options)
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    (shard,) = shards_of(tmp_path / "act")
    assert len(shard["tokens"]) == index_of(tmp_path / "act")["tokens"] > 0
    assert index_of(tmp_path / "act")["complete"] is False


def test_an_older_capture_is_replaced_with_force_only(instr: Instr, tmp_path: Path) -> None:
    capture = ("--capture", "l_out-0", "-o", "act")
    assert instr(*RUN, *capture).returncode == 0
    before = index_of(tmp_path / "act")
    done = instr(*RUN, *capture, "-n", 3)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--force" in done.stderr
    assert index_of(tmp_path / "act") == before
    assert instr(*RUN, *capture, "-n", 3, "--force").returncode == 0
    assert index_of(tmp_path / "act")["tokens"] < before["tokens"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--capture", "l_oout-*", "-o", "act"], "the nearest are l_out-"),
        (["--capture", "kq-0", "-o", "act", "--flash-attn", "off"], "have a row for each token"),
        (["--capture", "l_out-0"], "--capture PATTERN and --output DIR need each other"),
        (["-o", "act"], "--capture PATTERN and --output DIR need each other"),
        (["--capture", "l_out-0", "-o", "act", "--stats", "x"], "exclude each other"),
        (["--capture", "l_out-0", "-o", "full"], "contains another file (mine.txt)"),
        (["--capture", "l_out-0", "-o", "full/mine.txt"], "is not a directory"),
        (["--capture", "l_out-0", "-o", "no/where"], "no directory"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(
    arguments: list[str], reason: str, instr: Instr, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    done = instr(*RUN, *arguments)
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_the_python_of_the_page_loads_what_the_command_wrote(
    tmp_path: Path, instr: Instr, environment: dict[str, str]
) -> None:
    shutil.copyfile(DEMO, tmp_path / "model-F16.gguf")
    assert instr(*RUN, "--capture", "l_out-*", "-o", "activations").returncode == 0
    load, follow = blocks_of(ROOT / "docs" / "how-to" / "capture-activations.md", "python")
    for code in (load, follow):
        done = run_python(code, cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        if code == load:
            assert "shard-00000.safetensors (16, 256)" in done.stdout
    (shard,) = shards_of(tmp_path / "from-python")
    assert shard["ffn_out-0"].shape == (len(shard["tokens"]), 256)


def test_a_view_is_explained_not_suggested(tmp_path: Path) -> None:
    """The best experts are a view of all experts, sorted; no op computes that view."""
    words = "no op of the graph matches 'ffn_moe_topk-*'; ffn_moe_topk-0 is only a view of"
    model = random_model("llama-moe")
    with pytest.raises(UsageError, match=f"{re.escape(words)} ffn_moe_argsort-0$"):
        captured("ffn_moe_topk-*", tmp_path / "act", model, decodes=0)


def test_a_pattern_matches_names_and_the_last_op_of_a_name(tmp_path: Path) -> None:
    names = {}

    class Look:
        def wants(self, graph: Any, _ubatch: Any) -> tuple[()]:
            names.update({node.name: node.op for node in matching(graph, "Qcur-[01]")})
            return ()

        def passed(self, _stop: Any) -> None:
            pytest.fail("nothing was wanted")

    with opened(DEMO) as model:
        run(model, tmp_path / "log", followers=[Look()], decodes=0)
    assert names == {"Qcur-0": "ROPE", "Qcur-1": "ROPE"}
