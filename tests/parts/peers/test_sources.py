"""Every layout of one model becomes the same file, and what is wrong is refused in one line.

Not part of `make test`: it needs PyTorch. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import imports
from llamacpp_instr.lab.importer.source import import_model, imported, open_source
from tests.parts.peers import import_lines, peer_models
from tests.parts.peers.meta_folder import as_neighbors, write_meta

Instr = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, bytes]:
    """A model, its folder, and the bytes of the file that it becomes."""
    folder = tmp_path_factory.mktemp("whole") / "twin"
    model = peer_models.make_llama(folder, max_position_embeddings=4096, rms_norm_eps=1e-5)
    return model, folder, bytes_of(folder, "F32")


def bytes_of(folder: Path, type_: str | None = None) -> bytes:
    output = folder.parent / f"{folder.name}.gguf"
    import_model(open_source(folder), output, type_, force=True)
    return output.read_bytes()


def test_a_sharded_source_gives_the_same_bytes(
    llama: tuple[Any, Path, bytes], tmp_path: Path
) -> None:
    model, folder, expected = llama
    sharded = tmp_path / "twin"
    model.save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    copy_tokenizer(folder, sharded)
    assert bytes_of(sharded, "F32") == expected


def test_a_pickled_source_gives_the_same_bytes(
    llama: tuple[Any, Path, bytes], tmp_path: Path
) -> None:
    model, folder, expected = llama
    pickled = tmp_path / "twin"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    copy_tokenizer(folder, pickled)
    (pickled / "config.json").write_text((folder / "config.json").read_text())
    shutil.copyfile(folder / "generation_config.json", pickled / "generation_config.json")
    assert bytes_of(pickled, "F32") == expected


@pytest.mark.parametrize("n_shards", [1, 2])
def test_metas_layout_gives_the_same_bytes(
    n_shards: int, llama: tuple[Any, Path, bytes], tmp_path: Path
) -> None:
    model, folder, expected = llama
    write_meta(tmp_path / "twin", model, folder / "tokenizer.model", n_shards)
    assert bytes_of(tmp_path / "twin", "F32") == expected


def test_metas_grouped_heads_are_those_of_its_rope(llama: tuple[Any, Path, bytes]) -> None:
    """The writer of this test turns rows into neighbors as Meta's RoPE rotates them: rotated by
    hand, both layouts give the same products of Q and K."""
    model, _, _ = llama
    q, k = (getattr(model.model.layers[0].self_attn, f"{n}_proj").weight.detach() for n in "qk")
    x = torch.randn(2, 64)
    halves = scores(q, k, x, rotated_halves)
    neighbors = scores(as_neighbors(q, 4), as_neighbors(k, 2), x, rotated_neighbors)
    torch.testing.assert_close(halves, neighbors)


def scores(
    q: torch.Tensor, k: torch.Tensor, x: torch.Tensor, rotate: Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    """The product of the first query at position 5 with the first key at position 0."""
    return torch.dot(rotate((x[0] @ q.T)[:16]), (x[1] @ k.T)[:16])


def rotated_halves(head: torch.Tensor) -> torch.Tensor:
    angle = 5 / 10000 ** (torch.arange(8) / 8)
    a, b = head[:8], head[8:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def rotated_neighbors(head: torch.Tensor) -> torch.Tensor:
    """As Meta's apply_rotary_emb: pairs are complex numbers."""
    turn = torch.polar(torch.ones(8), 5 / 10000 ** (torch.arange(8) / 8))
    return torch.view_as_real(
        torch.view_as_complex(head.reshape(8, 2).contiguous()) * turn
    ).flatten()


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)


def test_run_imports_a_folder_once_for_each_of_its_states(
    llama: tuple[Any, Path, bytes], tmp_path: Path
) -> None:
    _, folder, _ = llama
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    notices: list[str] = []
    first = imported(own, notices.append)
    assert imported(own, notices.append) == first
    (own / "generation_config.json").write_text("{}")
    second = imported(own, notices.append)
    assert second != first
    assert not first.exists(), "one file for a folder"
    beginnings = [line.split()[0] for line in notices]
    assert beginnings == ["importing", "model:", "importing"]


@pytest.fixture
def place(
    llama: tuple[Any, Path, bytes], tmp_path: Path, environment: dict[str, str]
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a line in a folder with the files that the pages mention."""
    model, folder, _ = llama
    shutil.copytree(folder, tmp_path / import_lines.HUGGING_FACE)
    write_meta(tmp_path / import_lines.META, model, folder / "tokenizer.model", 1)
    write_adapter(tmp_path / import_lines.ADAPTER)
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env={**environment, "PATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def write_adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8, "r": 4}')
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.randn(4, 64), name.format("B"): torch.randn(96, 4)},
        folder / "adapter_model.safetensors",
    )


LINES = sorted(
    {line.text for line in import_lines.import_lines() if line.text.startswith("instr ")}
)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_pages_works(
    line: str, place: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    done = place(line)
    assert done.returncode == 0, done.stderr


def test_run_runs_a_folder(llama: tuple[Any, Path, bytes], started_instr: Instr) -> None:
    _, folder, _ = llama
    done = started_instr("run", folder, "-p", "Once", "-n", 4, "--log", "session.log")
    assert done.returncode == 0, done.stderr
    assert f"importing {folder} into the cache" in done.stderr
    again = started_instr("run", folder, "-p", "Once", "-n", 4, "--log", "second.log")
    assert again.stdout == done.stdout


class Evil:
    """A pickle of this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def evil_meta(folder: Path) -> None:
    file = folder / "consolidated.00.pth"
    torch.save({**torch.load(file), "evil": Evil(folder.parent / "ran")}, file)


def evil_hugging_face(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"evil": Evil(folder.parent / "ran")}, folder / "pytorch_model.bin")


def own_code(folder: Path) -> None:
    for name in ("tokenizer_config.json", "config.json"):
        config = json.loads((folder / name).read_text())
        config["auto_map"] = {
            "AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
        }  # fmt: skip
        config["architectures"] = ["DreamModel"]
        config["model_type"] = "unheard_of"
        config["tokenizer_class"] = "Tokenizer"
        (folder / name).write_text(json.dumps(config))
    (folder / "tokenizer.model").unlink()
    (folder / "evil.py").write_text(
        f"open({str(folder.parent / 'ran')!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast as Tokenizer\n"
        "from transformers import PretrainedConfig as Config\n"
    )


def with_architecture(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))


def another_architecture(folder: Path) -> None:
    with_architecture(folder, "AbacusForCausalLM")


def other_words(folder: Path) -> None:
    with_architecture(folder, "GPT2LMHeadModel")
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer_config.json").unlink()


def fewer_shards(folder: Path) -> None:
    (folder / "consolidated.01.pth").unlink()


def cut_shard(folder: Path) -> None:
    file = folder / "consolidated.01.pth"
    os.truncate(file, file.stat().st_size // 2)


def another_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").write_text("tokens\n")


def no_params(folder: Path) -> None:
    (folder / "params.json").write_text('{"dim": 64}')


WRONG: list[tuple[str, Callable[[Path], None], str]] = [
    ("meta", evil_meta, "it was not unpickled, because that could run code"),
    ("hf", evil_hugging_face, "it was not unpickled, because that could run code"),
    ("hf", own_code, "own Python code"),
    ("hf", another_architecture, "does not know the architecture AbacusForCausalLM"),
    ("hf", other_words, "cannot be imported"),
    ("meta2", fewer_shards, "are shards missing?"),
    ("meta2", cut_shard, "consolidated.01.pth is damaged"),
    ("meta", another_tokenizer, "is neither a SentencePiece model"),
    ("meta", no_params, "params.json lacks n_heads"),
]


@pytest.mark.parametrize(("layout", "spoil", "line"), WRONG, ids=[w[1].__name__ for w in WRONG])
def test_wrong_input_is_one_line_and_no_file(
    layout: str,
    spoil: Callable[[Path], None],
    line: str,
    llama: tuple[Any, Path, bytes],
    tmp_path: Path,
    started_instr: Instr,
) -> None:
    model, twin, _ = llama
    folder = tmp_path / "source"
    if layout == "hf":
        shutil.copytree(twin, folder)
    else:
        write_meta(folder, model, twin / "tokenizer.model", 2 if layout == "meta2" else 1)
    spoil(folder)
    before = set(tmp_path.iterdir())
    done = started_instr("import", folder, "-o", tmp_path / "out.gguf")
    assert line in done.stderr
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert set(tmp_path.iterdir()) == before, "no file: no output, no part of one, nothing that ran"


def test_memory_depends_on_the_largest_tensor_alone(tmp_path: Path) -> None:
    """Eight times as many layers take no more memory."""
    peaks = []
    for n_layers in (1, 8):
        folder = tmp_path / f"model-{n_layers}"
        imports.write_model(folder, n_layers, hidden_size=1024, intermediate_size=2816)
        peaks.append(imports.import_measured(folder, "-o", tmp_path / f"{n_layers}.gguf")[0])
    assert abs(peaks[1] - peaks[0]) < 40e6, peaks


def test_a_killed_or_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    peer_models.make_qwen3(folder)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-m", "llamacpp_instr", "import", folder, "-o", tmp_path / "out.gguf"],
            stderr=subprocess.DEVNULL,
        )
        started = time.monotonic()
        while not list(tmp_path.glob(".instr-*")) and time.monotonic() - started < 60:
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(number)
        process.wait(20)
        for _ in range(100):
            if not list(tmp_path.glob(".instr-*")):
                break
            time.sleep(0.1)
        assert [path.name for path in tmp_path.iterdir()] == ["model"], number
