"""Changes do what they say, to the bit, and the log says that they were made."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.capture import Captured, Patch, matching
from llamacpp_instr.debugger.changes import (
    AblatedLayer,
    Edit,
    Repeated,
    ablate_block,
    ablate_head,
    add_noise,
    change,
    load_values,
    replace,
    scale,
    set_to,
    zero,
)
from llamacpp_instr.debugger.changes import Note as Noting
from llamacpp_instr.debugger.residual import block_outputs, find_residual
from llamacpp_instr.debugger.stop import Debugging, Follower, Stop
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import Note
from tests.kit.debugger_kit import Run, opened, prompt_of, run, without
from tests.kit.native_kit import DEMO, random_model

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def plain() -> Run:
    with opened(DEMO) as model:
        return run(model)


def changed(
    log: Path, *changes: Callable[[Noting], Follower], model: Path = DEMO, **how: Any
) -> Run:
    """A run with changes; each is made with the function that notes it in the log."""

    def followers(debugging: Debugging) -> list[Follower]:
        return [change(debugging.recording.note) for change in changes]

    with opened(model) as loaded:
        return run(loaded, log, followers=followers, **how)


def repeated(pattern: str, edit: Edit, part: str = "") -> Callable[[Noting], Repeated]:
    return lambda note: Repeated(lambda graph: matching(graph, pattern), edit, note, part)


def notes(log: Path) -> list[Any]:
    return [
        event.data
        for _, event in read_events(log)
        if isinstance(event, Note) and event.name == "instr.change"
    ]


@pytest.mark.parametrize("pattern", ["l_out-*", "Qcur-*", "ffn_norm-2", "result_output"])
def test_scaling_by_1_changes_nothing(pattern: str, plain: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert changed(log, repeated(pattern, scale(1))).same_bits(plain)
    assert len(notes(log)) >= 3


def test_the_log_says_what_was_changed_where_and_is_clean(tmp_path: Path) -> None:
    log = tmp_path / "log"
    changed(log, repeated("ffn_out-1", zero(), "[:, :8]"), decodes=1, prompt=[1, 2, 3])
    where = {"node": "ffn_out-1", "what": "zero", "where": "[:, :8]"}
    first, *_ = notes(log)
    assert first == {**where, "step": 0, "compute": 0}
    assert list(check_log(log)) == []
    start = json.loads(log.read_text().splitlines()[0])
    assert start["perturbed"] is True


@pytest.mark.parametrize(
    ("name", "layer", "part", "weights"),
    [
        ("demo", 0, "feed-forward", ["ffn_down.weight"]),
        ("demo", 2, "feed-forward", ["ffn_down.weight"]),
        ("demo", 1, "attention", ["attn_output.weight"]),
        ("demo", 3, "attention", ["attn_output.weight"]),
        # parallel blocks, biases, experts, and norms after a block
        ("gpt2-dense", 1, "feed-forward", ["ffn_down.weight", "ffn_down.bias"]),
        ("gpt2-dense", 1, "attention", ["attn_output.weight", "attn_output.bias"]),
        ("gemma2-dense", 1, "feed-forward", ["ffn_down.weight"]),
        ("gemma2-dense", 1, "attention", ["attn_output.weight"]),
        ("phi2-dense", 1, "attention", ["attn_output.weight", "attn_output.bias"]),
        ("phi2-dense", 1, "feed-forward", ["ffn_down.weight", "ffn_down.bias"]),
        ("falcon-dense", 1, "attention", ["attn_output.weight"]),
        ("qwen3moe-moe", 1, "feed-forward", ["ffn_down_exps.weight"]),
        ("olmo2-dense", 1, "attention", ["attn_output.weight"]),
        ("cohere2-dense", 1, "feed-forward", ["ffn_down.weight"]),
    ],
)
def test_without_a_block_it_is_a_model_whose_block_has_zeros_for_weights(
    name: str, layer: int, part: Any, weights: list[str], tmp_path: Path
) -> None:
    model = DEMO if name == "demo" else random_model(name)
    ablated = changed(tmp_path / "log", lambda note: ablate_block(layer, part, note), model=model)
    with opened(model) as loaded:
        unchanged = run(loaded)
    zeros = [f"blk.{layer}.{weight}" for weight in weights]
    with opened(without(model, zeros, tmp_path / "zeroed.gguf")) as loaded:
        zeroed = run(loaded, tmp_path / "log", breakpoints=["*"])
    assert ablated.same_bits(zeroed)
    assert not ablated.same_bits(unchanged)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_without_all_heads_it_is_without_attention(flash_attn: str, tmp_path: Path) -> None:
    def without_heads(*heads: int) -> Run:
        changes = [lambda note, head=head: ablate_head(2, head, note) for head in heads]
        return changed(tmp_path / "log", *changes, flash_attn=flash_attn)

    headless, one = without_heads(0, 1, 2, 3), without_heads(1)
    blockless = changed(
        tmp_path / "log", lambda note: ablate_block(2, "attention", note), flash_attn=flash_attn
    )
    assert headless.same_bits(blockless)
    assert not one.same_bits(headless)


def test_without_a_layer_it_is_without_its_blocks(plain: Run, tmp_path: Path) -> None:
    layerless = changed(tmp_path / "log", lambda note: AblatedLayer(1, note))
    blockless = changed(
        tmp_path / "log",
        lambda note: ablate_block(1, "attention", note),
        lambda note: ablate_block(1, "feed-forward", note),
    )
    assert layerless.same_bits(blockless)
    assert not layerless.same_bits(plain)


def test_patching_whole_layers_of_another_prompt_gives_its_continuation(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with opened(DEMO) as model:
        other = prompt_of(model, first=5)
        captured = Captured("l_out-*")
        theirs = run(model, log, followers=[captured], prompt=other)
        ours = run(model, log)
    patched = changed(log, lambda note: Patch(captured, note))
    assert patched.same_bits(theirs)
    assert patched.tokens == theirs.tokens != ours.tokens


def test_a_patch_of_some_positions_changes_only_those(tmp_path: Path) -> None:
    seen: dict[str, np.ndarray] = {}

    def keep(name: str) -> Callable[[Stop], None]:
        def on_stop(stop: Stop) -> None:
            seen[name] = stop.values()

        return on_stop

    with opened(DEMO) as model:
        captured = Captured("l_out-1")
        place = {"breakpoints": ["l_out-1"], "decodes": 0}
        run(
            model, tmp_path / "log", followers=[captured], prompt=prompt_of(model, first=5),
            on_stop=keep("theirs"), **place,
        )  # fmt: skip
        run(model, tmp_path / "log", on_stop=keep("ours"), **place)
    changed(
        tmp_path / "log", lambda note: Patch(captured, note, {3, 7}),
        on_stop=keep("patched"), **place,
    )  # fmt: skip
    expected = seen["ours"].copy()
    expected[[3, 7]] = seen["theirs"][[3, 7]]
    assert np.array_equal(seen["patched"], expected)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (set_to(2.5), lambda old: np.full_like(old, 2.5)),
        (zero(), np.zeros_like),
        (scale(-2), lambda old: old * -2),
        (replace(np.arange(8, dtype=np.float32), "x.npy"), lambda _: np.arange(8)),
    ],
)
def test_a_change_of_a_part_leaves_the_rest(edit: Edit, expected: Any, tmp_path: Path) -> None:
    checked = []

    def on_stop(stop: Stop) -> None:
        old = stop.values()
        change(stop, edit, lambda *_: None, part="[3, :8]")
        new = stop.values()
        assert np.array_equal(new[3, :8], expected(old[3, :8]))
        new[3, :8] = old[3, :8]
        checked.append(np.array_equal(new, old))

    with opened(DEMO) as model:
        run(model, tmp_path / "log", breakpoints=["ffn_out-1"], on_stop=on_stop, decodes=0)
    assert checked == [True]


def test_noise_is_that_of_its_seed(plain: Run, tmp_path: Path) -> None:
    runs = [
        changed(tmp_path / "log", repeated("ffn_out-1", add_noise(0.1, seed))) for seed in (1, 1, 2)
    ]
    assert runs[0].same_bits(runs[1])
    assert not runs[0].same_bits(runs[2])
    assert not runs[0].same_bits(plain)


@pytest.mark.parametrize(
    ("name", "edit", "part", "reason"),
    [
        ("blk.0.attn_norm.weight", zero(), "", "is a weight"),
        (None, replace(np.zeros(3), "x.npy"), "[0]", r"has the shape \(3,\)"),
        (None, zero(), "[999]", "outside a dimension of"),
        ("ffn_out-3", zero(), "", "has not been computed yet"),
        ("ffn_ouut-0", zero(), "", "the nearest are"),
        ("attn_norm-0", zero(), "", "is gone"),
        ("inp_pos", zero(), "", "holds row numbers"),
    ],
)
def test_a_change_that_cannot_be_is_one_line_and_changes_nothing(
    name: str | None, edit: Edit, part: str, reason: str, plain: Run, tmp_path: Path
) -> None:
    def on_stop(stop: Stop) -> None:
        with pytest.raises(UsageError, match=reason) as error:
            change(stop, edit, lambda *_: pytest.fail("a note"), name, part)
        assert "\n" not in str(error.value)

    with opened(DEMO) as model:
        done = run(model, tmp_path / "log", breakpoints=["ffn_out-1"], on_stop=on_stop)
    assert done.same_bits(plain)


@pytest.mark.parametrize(
    ("follower", "reason"),
    [
        (lambda note: ablate_block(9, "attention", note), "no layer 9; the layers are 0 to 3"),
        (lambda note: ablate_head(1, 4, note), "no head 4; its heads are 0 to 3"),
        (lambda note: AblatedLayer(4, note), "no layer 4"),
        (lambda _: Captured("l_oout-*"), "no op of the graph matches 'l_oout-*'; the nearest are"),
    ],
)
def test_what_a_model_does_not_have_is_one_line(follower: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        changed(tmp_path / "log", follower)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_every_layer_of_most_architectures_has_blocks_to_take_out(tmp_path: Path) -> None:
    found = {}

    class Look:
        def wants(self, graph: Any, _ubatch: Any) -> tuple[()]:
            residual = find_residual(graph)
            found[path.stem] = {
                layer: set(block_outputs(graph, residual, layer)) for layer in residual.after
            }
            return ()

        def passed(self, _stop: Stop) -> None:
            pytest.fail("nothing was wanted")

    for name in ("llama-dense", "phi2-dense", "gptneox-dense", "command-r-dense", "grok-moe"):
        path = random_model(name)
        with opened(path) as model:
            run(model, tmp_path / "log", followers=[Look()], decodes=0)
    assert {frozenset(parts) for of in found.values() for parts in of.values()} == {
        frozenset({"attention", "feed-forward"})
    }


def test_values_come_from_files_with_one_array(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "b.npz", x=values, y=values + 1)
    from safetensors.numpy import save_file

    save_file({"x": values}, tmp_path / "c.safetensors")
    assert np.array_equal(load_values(tmp_path / "a.npy"), values)
    assert np.array_equal(load_values(tmp_path / "c.safetensors"), values)
    with pytest.raises(UsageError, match=r"has 2 arrays \(x, y\); give a file with one"):
        load_values(tmp_path / "b.npz")


def test_a_compressed_array_costs_no_more_than_what_it_replaces(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", np.zeros(1 << 24))
    edit = replace(tmp_path / "bomb.npz", "bomb.npz")
    tracemalloc.start()
    with pytest.raises(UsageError, match="134,217,856 bytes, for 32 values"):
        edit.new(np.zeros((4, 8), np.float32))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    np.savez_compressed(tmp_path / "fits.npz", np.ones((4, 8)))
    new = replace(tmp_path / "fits.npz", "fits.npz").new(np.zeros((4, 8), np.float32))
    assert np.array_equal(new, np.ones((4, 8)))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("a.npy", None, "No such file"),
        ("a.npy", b"nonsense", "cannot be read"),
        ("a.npz", b"PK\x03\x04nonsense", "cannot be read"),
        ("a.safetensors", b"\xff" * 20, "cannot be read"),
        ("a.txt", b"1 2 3", ".npy, .npz or .safetensors"),
    ],
)
def test_a_file_that_holds_no_values_is_one_line(
    file: str, content: bytes | None, reason: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UsageError) as error:
        load_values(tmp_path / file)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
