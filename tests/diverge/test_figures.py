"""The errors and KL divergences of `instr diverge`, against numpy and against model files."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result

from llamacpp_instr import cli
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.diverge.run import (
    Divergences,
    DivergeOptions,
    Key,
    TensorError,
    compare_models,
    opened_pair,
)
from llamacpp_instr.diverge.shares import measure_shares
from llamacpp_instr.model.file import load_model_file
from tests.kit.debugger_kit import opened, run
from tests.kit.gguf_files import save
from tests.kit.in_process import titled
from tests.kit.native_kit import DEMO
from tests.kit.quantized_kit import quantized_demo
from tests.kit.tiny_models import write_bert, write_gpt2, write_llama, write_speaker

TEXT = "Once upon a time there was a little girl who liked to play in the park with her dog."


def compared(b: Path, why: bool = False, memory: int = 2**29) -> Divergences:
    options = DivergeOptions(tokens=16, memory=memory, threads=1)
    a, b_file = load_model_file(DEMO), load_model_file(b)
    return compare_models(a, b_file, TEXT, options, why, lambda *_: None, lambda *_: None)


def instr(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["diverge", *map(str, words)])


class Collected:
    """The values of all nodes of one compute."""

    def __init__(self) -> None:
        self.values: dict[Key, np.ndarray] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> list[int]:
        self._keys: dict[int, Key] = {}
        seen: dict[str, int] = {}
        for node in graph.nodes:
            place = seen[node.name] = seen.get(node.name, -1) + 1
            self._keys[node.index] = Key(node.name, place)
        return [node.index for node in graph.nodes if node.runs]

    def passed(self, stop: Stop) -> None:
        self.values[self._keys[stop.node.index]] = stop.values().astype(np.float64)


def all_values(model: Path, log: Path) -> dict[Key, np.ndarray]:
    collected = Collected()
    with opened(model) as loaded:
        tokens = loaded.tokenize(TEXT)[:16]
        run(loaded, log, followers=[collected], prompt=tokens, decodes=0, all_logits=True)
    return collected.values


@pytest.mark.native
def test_errors_equal_those_of_numpy_on_the_values_of_both(tmp_path: Path) -> None:
    """numpy gets one pass over all tokens; the command computes one token, then the others."""
    b = quantized_demo("Q8_0")
    found = {e.key: e for e in compared(b).errors}
    ours, theirs = (all_values(m, tmp_path / f"{m.stem}.log") for m in (DEMO, b))
    for key, e in found.items():
        a, d = ours[key], theirs[key] - ours[key]
        norm = float(np.linalg.norm(a))
        assert e.relative == pytest.approx(float(np.linalg.norm(d)) / norm, rel=0.02), key
        both = float(np.vdot(a, a + d)) / norm / float(np.linalg.norm(a + d))
        assert e.cosine == pytest.approx(both, abs=1e-5), key
        if e.channels is not None:
            by_channel = (d * d).sum(axis=0)
            assert e.channels[0].sum() == pytest.approx(by_channel.sum(), rel=0.05)
            assert e.channels.shape[1] == a.shape[-1]
    assert len(found) > 50


def test_sums_of_parts_are_those_of_all_values() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 12, 40)).astype(np.float32)
    b[:, 7] += 3
    e = TensorError(Key("x", 0), "MUL_MAT", 0, "attention", (), ())
    for rows in (slice(0, 1), slice(1, 12)):
        e.add(a[rows], b[rows].copy(), has_tokens=True, keeps_rows=True)
    d = b.astype(np.float64) - a
    assert e.nmse == pytest.approx((d * d).sum() / (a.astype(np.float64) ** 2).sum(), rel=1e-6)
    assert e.cosine == pytest.approx(np.corrcoef(a.ravel(), b.ravel())[0, 1], abs=0.02)
    assert e.channels is not None
    assert e.channels[0] == pytest.approx((d * d).sum(axis=0), rel=1e-5)
    assert int(e.channels[0].argmax()) == 7
    assert np.concatenate(e.rows, axis=1)[0] == pytest.approx((d * d).sum(axis=1), rel=1e-5)


def test_infinities_of_a_mask_are_no_error_and_a_nan_in_one_is_infinite() -> None:
    a = np.array([[1.0, -np.inf, 2.0]], np.float32)
    e = TensorError(Key("x", 0), "ADD", 0, "attention", (), ())
    e.add(a, a.copy(), has_tokens=False, keeps_rows=False)
    assert (e.relative, e.cosine) == (0, pytest.approx(1))
    e.add(a, np.array([[1.0, -np.inf, np.nan]], np.float32), has_tokens=False, keeps_rows=False)
    assert e.relative == np.inf


@pytest.mark.native
def test_a_smaller_memory_gives_the_same_errors_in_more_parts() -> None:
    b = quantized_demo("Q8_0")
    wide, narrow = compared(b), compared(b, memory=2**20)
    assert narrow.most_bytes <= 2**20 < wide.most_bytes
    assert len(narrow.errors[0].parts) > len(wide.errors[0].parts)
    for one, other in zip(wide.errors, narrow.errors, strict=True):
        assert one.relative == pytest.approx(other.relative, rel=0.1), one.key
    assert wide.kl == pytest.approx(narrow.kl, abs=1e-4)


@pytest.mark.native
def test_a_mixture_in_memory_computes_what_its_file_computes(tmp_path: Path) -> None:
    """A file with half of the weights of each model has the KL divergence of the exchange."""
    a, b = load_model_file(DEMO), load_model_file(quantized_demo("Q4_0"))
    names = {weight.name for i, weight in enumerate(a.weights) if i % 2}
    options = DivergeOptions(tokens=16, threads=1)
    with opened_pair(a, b, TEXT, options) as pair:
        pair.compare(lambda *_: None)
        with pair.mixtures() as kl_of:
            mixture, nothing = kl_of(names), kl_of(())
            everything = kl_of([weight.name for weight in a.weights])
    found = compared(mixed(DEMO, b.path, names, tmp_path / "mixed.gguf"))
    assert mixture == pytest.approx(float(found.kl.mean()), rel=0.02)
    assert everything == pytest.approx(float(compared(b.path).kl.mean()), rel=0.02)
    assert mixture not in (0, everything)
    assert nothing == 0


def mixed(a: Path, b: Path, names: Set[str], to: Path) -> Path:
    """A copy of A with these tensors of B."""
    readers = gguf.GGUFReader(a), gguf.GGUFReader(b)
    writer = gguf.GGUFWriter(to, "llama")
    for field in readers[0].fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub)
    theirs = {tensor.name: tensor for tensor in readers[1].tensors}
    for own in readers[0].tensors:
        tensor = theirs[own.name] if own.name in names else own
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    save(writer)
    return to


@pytest.mark.native
def test_shares_are_those_of_all_weights_that_differ_and_predict_a_mixture() -> None:
    a, b = load_model_file(DEMO), load_model_file(quantized_demo("Q4_0"))
    found = compared(b.path, why=True)
    assert found.shares is not None
    names = [name for share in found.shares.shares for name in share.names]
    differ = {w.name for w in a.weights if w.type != b.by_name[w.name].type}
    assert (len(names), set(names)) == (len(differ), differ)
    assert found.shares.predicted(differ) == pytest.approx(found.shares.sum)
    assert found.shares.whole == pytest.approx(float(found.kl.mean()), rel=0.02)
    assert 0.3 < found.shares.sum / found.shares.whole < 2


def test_groups_that_matter_are_divided() -> None:
    """With a measure whose shares are known: they add up, and a small group stays whole."""
    costs = {"output.weight": 2.0}
    for i, cost in enumerate((1.0, 1e-4)):
        costs |= {f"blk.{i}.attn_{role}.weight": cost for role in "qk"}
    calls: list[tuple[int, int]] = []
    shares = measure_shares(
        lambda names: sum(costs[name] for name in names), list(costs), lambda *n: calls.append(n)
    )
    found = {share.names: share.kl for share in shares.shares}
    assert found == {
        ("blk.0.attn_q.weight",): 1,
        ("blk.0.attn_k.weight",): 1,
        ("blk.1.attn_q.weight", "blk.1.attn_k.weight"): 2e-4,
        ("output.weight",): 2,
    }
    assert shares.sum == pytest.approx(shares.whole)
    assert calls[-1] == (6, 6)


@pytest.mark.native
@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("demo llama.gguf", "have different hyper-parameters: llama."),
        ("llama.gguf gpt2.gguf", "have different architectures: llama and gpt2"),
        ("llama.gguf deeper.gguf", "llama.block_count is 2 and 3"),
        ("ab.gguf ac.gguf", "have different vocabularies: token 6 is"),
        ("bert.gguf bert.gguf", "is an encoder; it does not predict"),
        ("llama.gguf missing.gguf", "missing.gguf"),
        ("llama.gguf llama.gguf --tokens 0", "'--tokens': 0 is not in the range"),
        ("llama.gguf llama.gguf --tokens 100000000", "is not in the range 1<=x<=65536"),
        ("llama.gguf llama.gguf --ctx 1", "'--ctx': 1 is not in the range"),
        ("llama.gguf llama.gguf --memory 0", "'--memory': 0 is not in the range"),
        ("llama.gguf llama.gguf --bound nan", "--bound is nan; it must be 0 or larger"),
        ("llama.gguf llama.gguf --text missing.txt", "the text missing.txt cannot be read"),
        ("llama.gguf llama.gguf --text empty.txt", "the text is empty"),
    ],
)
def test_a_wrong_input_is_one_line(
    pair: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_llama(Path("llama.gguf"))
    write_llama(Path("deeper.gguf"), layers=3)
    write_gpt2(Path("gpt2.gguf"))
    write_bert(Path("bert.gguf"))
    write_speaker(Path("ab.gguf"), ["b"])
    write_speaker(Path("ac.gguf"), ["c"])
    Path("empty.txt").write_text("")
    done = instr(*pair.split(), "-o", "out.json")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert message in done.stderr
    assert not Path("out.json").exists()


@pytest.mark.native
def test_json_has_every_tensor(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ("demo", quantized_demo("Q8_0"), "--tokens", 16, "--threads", 1, "-o", out)
    done = instr(*words, "--bound", 0)
    assert done.exit_code == 0, done.output
    reports = titled(json.loads(out.read_text()))
    assert reports[0]["title"].startswith("The first op beyond 0 is embd (GET_ROWS)")
    assert len(reports[-1]["rows"]) == 74
    assert reports[0]["figures"]["KL divergence"]["value"] > 0


@pytest.mark.native
def test_too_little_memory_for_one_token_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the values of 1 token take 1 MiB; give --memory 1 or"):
        compared(quantized_demo("Q8_0"), memory=1000)
