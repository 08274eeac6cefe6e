"""`instr validate --reference` finds nothing in an import, and names the damaged place of another.

Not part of `make test`: it needs PyTorch. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from llamacpp_instr.converters.validate.against import (
    OF_F32,
    Comparison,
    compare,
    compute_states,
    default_bound,
    judge_states,
    transformers_states,
)
from llamacpp_instr.converters.validate.live import prompt_tokens
from llamacpp_instr.lab.importer.source import import_model, open_source
from llamacpp_instr.model.file import Weight, load_model_file
from tests.kit.debugger_kit import opened
from tests.parts.peers import import_lines, peer_models

Instr = Callable[..., "subprocess.CompletedProcess[str]"]
Reference = Callable[[Path], Comparison]


@pytest.fixture(scope="module")
def compared(decoder: tuple[Any, Path, Path]) -> Reference:
    """Compares a file with what transformers computed once of the decoder's folder."""
    _, folder, imported = decoder
    return against(folder, imported)


def against(folder: Path, imported: Path) -> Reference:
    with opened(imported) as model:
        tokens = prompt_tokens(model, None)
        api: Any = model.api
        layers, width = (api.llama_model_n_layer, api.llama_model_n_embd)
        sizes = {
            "path": str(imported), "n_layers": layers(model.handle),
            "width": width(model.handle), "n_vocab": model.n_vocab,
        }  # fmt: skip
    theirs = transformers_states(open_source(folder), sizes, tokens, 2, lambda _done, _total: None)

    def compare_file(path: Path) -> Comparison:
        with opened(path) as model:
            ours = compute_states(model, tokens, 2, "off")
        return compare(ours.values, theirs, ours.nodes)

    return compare_file


def parts_at(found: Comparison, bound: float = OF_F32) -> Any:
    return judge_states(found, bound, "").reports[0].figures["parts at"][0]


def test_all_states_of_an_import_are_those_of_transformers(
    decoder: tuple[Any, Path, Path], compared: Reference
) -> None:
    model, _, imported = decoder
    found = compared(imported)
    layers = [f"layer {number}" for number in range(model.config.num_hidden_layers)]
    assert [of.state for of in found.states] == ["embeddings", *layers, "final norm", "logits"]
    # ggml looks GELU up in a table of F16
    limit = OF_F32 if model.config.model_type == "gemma3_text" else 1e-5
    assert max(of.error for of in found.states) < limit
    assert min(of.cosine for of in found.states) > 1 - limit
    assert found.same_top == found.n_tokens


def test_a_damaged_weight_is_found_in_its_layer(
    decoder: tuple[Any, Path, Path], compared: Reference, tmp_path: Path
) -> None:
    _, _, imported = decoder
    weights = load_model_file(imported).by_name
    places = {"output_norm.weight": "final norm", "token_embd.weight": "embeddings"}
    if "output.weight" in weights:
        places["output.weight"] = "logits"
    for name in weights:
        part, _, rest = name.removeprefix("blk.").partition(".")
        if rest in ("attn_output.weight", "ffn_norm.weight"):
            places[name] = f"layer {part}"
    assert len(places) >= 2 + 2 * 2
    for name, state in places.items():
        assert (
            parts_at(compared(with_zeros(imported, weights[name], tmp_path / "copy.gguf"))) == state
        ), name


def with_zeros(model: Path, weight: Weight, to: Path) -> Path:
    """A copy in which the weight is zero."""
    shutil.copyfile(model, to)
    np.memmap(to, np.uint8, "r+", weight.offset, (weight.n_bytes,))[:] = 0
    return to


def test_one_number_that_is_wrong_is_found(
    decoder: tuple[Any, Path, Path], compared: Reference, tmp_path: Path
) -> None:
    """The smallest damage: in each layer, one number of a norm is doubled."""
    _, _, imported = decoder
    for name, weight in load_model_file(imported).by_name.items():
        if not name.endswith("ffn_norm.weight"):
            continue
        copy = tmp_path / "copy.gguf"
        shutil.copyfile(imported, copy)
        numbers = np.memmap(copy, np.float32, "r+", weight.offset, weight.ne)
        numbers[7] *= 2
        numbers.flush()
        layer = name.split(".")[1]
        assert parts_at(compared(copy)) == f"layer {layer}", name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder and its import."""
    folder = tmp_path_factory.mktemp("against") / "llama"
    peer_models.make_llama(folder)
    import_model(open_source(folder), folder.with_suffix(".gguf"), "F32")
    return folder, folder.with_suffix(".gguf")


@pytest.mark.parametrize("type_", ["F16", "BF16", "Q8_0"])
def test_the_default_bound_covers_the_rounding_of_a_type(
    type_: str, llama: tuple[Path, Path], of_llama: Reference, tmp_path: Path
) -> None:
    folder, _ = llama
    file = import_model(open_source(folder), tmp_path / "model.gguf", type_)
    assert file is not None
    found = of_llama(tmp_path / "model.gguf")
    bound, coarsest = default_bound(file)
    assert coarsest.name == type_
    assert parts_at(found, bound) is None
    assert max(of.error for of in found.states) > bound / 20, "and it is not far above it"


@pytest.fixture(scope="module")
def of_llama(llama: tuple[Path, Path]) -> Reference:
    return against(*llama)


def test_the_command_agrees_and_parts(
    llama: tuple[Path, Path], tmp_path: Path, started_instr: Instr
) -> None:
    """With another rope theta, the embeddings agree and the first layer does not."""
    folder, imported = llama
    same = started_instr(
        "validate", imported, "--reference", folder, "--prompt", "Once upon a time", "--json"
    )
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout)[0]["figures"]["parts_at"]["value"] is None
    turned = copied(folder, tmp_path)
    changed(turned, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    other = started_instr("validate", imported, "--reference", turned)
    assert other.returncode == 1, other.stderr
    assert "They diverge at layer 0: its error is the first beyond 0.001" in other.stdout
    loose = started_instr("validate", imported, "--reference", turned, "--bound", 10)
    assert loose.returncode == 0, loose.stderr


@pytest.mark.parametrize("line", sorted({line.text for line in import_lines.against_lines()}))
def test_a_line_of_the_pages_works(
    line: str, llama: tuple[Path, Path], tmp_path: Path, started_instr: Instr
) -> None:
    folder, imported = llama
    shutil.copytree(folder, tmp_path / import_lines.HUGGING_FACE)
    shutil.copyfile(imported, tmp_path / "llama.gguf")
    done = started_instr(*shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to / "folder")
    return to / "folder"


def changed(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def other_vocabulary(folder: Path) -> None:
    changed(folder, vocab_size=600)


def fewer_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def other_shape(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:50].clone()
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def own_code(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    changed(
        folder,
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        model_type="unheard_of",
    )


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (other_vocabulary, "has 512 tokens in its vocabulary, but {} has 600"),
    (fewer_weights, "{} lacks weights: model.layers.1.mlp.up_proj.weight"),
    (other_shape, "transformers cannot run it"),
    (own_code, "{}: the model needs its own Python code, which instr does not run"),
]


@pytest.mark.parametrize(("spoil", "line"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_wrong_input_is_one_line(
    spoil: Callable[[Path], None],
    line: str,
    llama: tuple[Path, Path],
    tmp_path: Path,
    started_instr: Instr,
) -> None:
    folder = copied(llama[0], tmp_path)
    spoil(folder)
    out = tmp_path / "out.json"
    done = started_instr("validate", llama[1], "--reference", folder, "-o", out)
    assert line.format(folder) in done.stderr
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert not out.exists()
    assert not (folder / "ran").exists()


def test_an_encoder_is_refused(tmp_path: Path, started_instr: Instr) -> None:
    peer_models.make_bert(tmp_path / "bert")
    imported = tmp_path / "bert.gguf"
    import_model(open_source(tmp_path / "bert"), imported, "F32")
    done = started_instr("validate", imported, "--reference", tmp_path / "bert")
    assert done.stderr == (
        f"Error: {imported} is an encoder; only decoder models can be validated\n"
    )
    assert done.returncode == 2
