"""Values on which llama.cpp would end the process are refused in one line; others pass."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.header import read_header
from llamacpp_instr.model.hyper_parameters import check_hyper_parameters
from tests.conftest import Instr, assert_refused
from tests.kit.gguf_files import save
from tests.kit.mutants import damaged
from tests.kit.native_kit import DEMO, random_model

pytestmark = pytest.mark.native


def rewritten(path: Path, key: str, value: int | str) -> Path:
    """A copy of the demo model with a metadata entry added or changed."""
    kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
    writer, new = gguf.GGUFWriter(path, "llama"), {key: MetadataDetails(kind, value)}
    copy_with_new_metadata(gguf.GGUFReader(DEMO), writer, new, [])
    return path


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", 0, "not from 1 to 512"),
        ("llama.block_count", 513, "not from 1 to 512"),
        ("llama.nextn_predict_layers", 5, "more than the 4 layers"),
        ("llama.expert_count", 1025, "more than 1024"),
        ("llama.expert_count", 8, "llama.expert_used_count is 0 of 8"),
        ("llama.expert_used_count", 2, "2 of 0 experts"),
        ("llama.expert_group_count", 2, "no experts"),
        ("llama.rope.dimension_count", 0, "not more than 0"),
        ("llama.rope.dimension_count_swa", 0, "not more than 0"),
        ("llama.attention.indexer.block_size", 65537, "more than 65536"),
        ("llama.embedding_length_out", 2**31, "more than 65536"),
        ("llama.hyper_connection.sinkhorn_iterations", 1025, "more than 1024"),
        ("llama.token_shift_count", 3, "more than 2"),
        ("llama.rope.scaling.type", "sideways", "'sideways', which llama.cpp does not know"),
    ],
)
def test_a_hostile_value_is_named(
    instr: Instr, tmp_path: Path, key: str, value: int | str, words: str
) -> None:
    path = rewritten(tmp_path / "hostile.gguf", key, value)
    assert_refused(instr("run", path, "-p", "a", "-n", "1"), "llama.", words)
    assert not (tmp_path / "session.log").exists()


@pytest.mark.parametrize("key", ["rope.dimension_count", "rope.dimension_count_swa"])
def test_nothing_is_rotated_only_with_latent_attention(tmp_path: Path, key: str) -> None:
    """Otherwise a kernel never ends, even if the file claims attention that the model lacks."""
    path = random_model("gemma3-dense")
    for name, value in ((key, 0), ("attention.key_length_mla", 192)):
        path = damaged(path, tmp_path / f"{name}.gguf", f"gemma3.{name}", value)
    with pytest.raises(UsageError, match=rf"gemma3\.{key} is 0, not more than 0"):
        check_hyper_parameters(path, read_header(path))


def test_quality_survives_what_only_an_architecture_asserts(instr: Instr, tmp_path: Path) -> None:
    """The model is first loaded in a child process, whose end is one line."""
    path = rewritten(tmp_path / "hostile.gguf", "llama.attention.head_count_kv", 3)
    done = instr("quality", "demo", path, "--chunks", "1", "--only", "outputs")
    assert done.returncode == 2, done.stderr
    assert str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_experts_used_by_layer(tmp_path: Path) -> None:
    """llama.cpp allows one number for all layers, or one per layer: the largest counts."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_uint32("llama.expert_count", 4)
    writer.add_array("llama.expert_used_count", [2, 5])
    save(writer)
    with pytest.raises(UsageError, match="expert_used_count is 5 of 4 experts"):
        check_hyper_parameters(tmp_path / "m.gguf", read_header(tmp_path / "m.gguf"))
