"""Each rule for hyper-parameters, with a value on either side of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.header import read_header
from llamacpp_instr.model.hyper_parameters import check_hyper_parameters
from tests.kit.gguf_files import save

Values = dict[str, int | str | list[int]]
EXPERTS: Values = {"expert_count": 8, "expert_used_count": 2}
GROUPS: Values = {**EXPERTS, "expert_group_count": 4, "expert_group_used_count": 2}
LATENT: Values = {"attention.key_length_mla": 192, "rope.dimension_count": 0}


def problem(path: Path, arch: str, values: Values) -> str | None:
    """The message for a model with these hyper-parameters, without its path."""
    path.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        match value:
            case str():
                writer.add_string(f"{arch}.{key}", value)
            case list():
                writer.add_array(f"{arch}.{key}", value)
            case _:
                writer.add_uint32(f"{arch}.{key}", value)
    save(writer)
    try:
        check_hyper_parameters(path, read_header(path))
    except UsageError as error:
        return str(error).removeprefix(str(path)).removeprefix(" is damaged: ").lstrip(": ")
    return None


@pytest.mark.parametrize(
    ("arch", "values"),
    [
        ("llama", {}),
        ("llama", {"block_count": 1}),
        ("llama", {"block_count": 512}),
        ("llama", {"block_count": 4, "nextn_predict_layers": 4, "posnet.block_count": 4}),
        ("llama", {"expert_count": 1024, "expert_used_count": 1024}),
        ("llama", {"expert_count": 1, "expert_used_count": 1}),
        ("llama", EXPERTS),
        ("llama", {**EXPERTS, "expert_group_count": 1}),
        ("llama", GROUPS),
        ("llama", {**GROUPS, "expert_group_used_count": 1}),
        ("llama", {**GROUPS, "expert_group_used_count": 3}),
        ("llama", {"block_count": 2, "expert_count": 5, "expert_used_count": [2, 5]}),
        ("hunyuan-dense", {"expert_count": 1}),
        ("hunyuan_vl", {"expert_count": 1}),
        ("llama", {"rope.dimension_count": 1, "rope.dimension_count_swa": 1}),
        ("deepseek2", LATENT),
        ("llama", {"attention.indexer.block_size": 65536, "embedding_length_out": 65536}),
        ("llama", {"hyper_connection.sinkhorn_iterations": 1024, "token_shift_count": 2}),
        *(("llama", {"rope.scaling.type": of}) for of in ("none", "linear", "yarn", "longrope")),
    ],
)
def test_what_llama_cpp_accepts_passes(tmp_path: Path, arch: str, values: Values) -> None:
    assert problem(tmp_path / "m.gguf", arch, values) is None


@pytest.mark.parametrize(
    ("arch", "values", "words"),
    [
        ("llama", {"block_count": 0}, "block_count is 0, not from 1 to 512"),
        ("llama", {"block_count": 513}, "block_count is 513, not from 1 to 512"),
        *(
            ("llama", {"block_count": 4, key: 5}, f"{key} is 5, more than the 4 layers")
            for key in ("nextn_predict_layers", "posnet.block_count", "convnext.block_count")
        ),
        ("llama", {"expert_count": 1025, "expert_used_count": 1},
         "expert_count is 1025, more than 1024"),
        ("llama", {"expert_count": 8}, "expert_used_count is 0 of 8 experts"),
        ("llama", {"expert_count": 1}, "expert_used_count is 0 of 1 experts"),
        ("llama", {"expert_count": 8, "expert_used_count": 9},
         "expert_used_count is 9 of 8 experts"),
        ("llama", {"expert_used_count": 2}, "expert_used_count is 2 of 0 experts"),
        ("llama", {"block_count": 2, "expert_count": 4, "expert_used_count": [5, 2]},
         "expert_used_count is 5 of 4 experts"),
        ("hunyuan-dense", {"expert_count": 2}, "expert_used_count is 0 of 2 experts"),
        ("llama", {"expert_group_count": 1},
         "expert_group_count is 1, but the model has no experts"),
        ("llama", {**EXPERTS, "expert_group_count": 8},
         "expert_group_count is 8, not less than the 8 experts"),
        ("llama", {**GROUPS, "expert_group_count": 3},
         "expert_group_count is 3, which does not divide 8"),
        ("llama", {**GROUPS, "expert_group_used_count": 0},
         "expert_group_used_count is 0, of 4 groups"),
        ("llama", {**GROUPS, "expert_group_used_count": 4},
         "expert_group_used_count is 4, of 4 groups"),
        ("llama", {**EXPERTS, "expert_group_count": 2},
         "expert_group_used_count is 0, of 2 groups"),
        *(
            ("llama", {key: 0}, f"{key} is 0, not more than 0")
            for key in ("rope.dimension_count", "rope.dimension_count_swa")
        ),
        ("llama", LATENT, "rope.dimension_count is 0, not more than 0"),
        ("deepseek2", {"rope.dimension_count": 0}, "rope.dimension_count is 0, not more than 0"),
        ("llama", {"attention.indexer.block_size": 65537},
         "attention.indexer.block_size is 65537, more than 65536"),
        ("llama", {"embedding_length_out": 65537},
         "embedding_length_out is 65537, more than 65536"),
        ("llama", {"hyper_connection.sinkhorn_iterations": 1025},
         "hyper_connection.sinkhorn_iterations is 1025, more than 1024"),
        ("llama", {"token_shift_count": 3}, "token_shift_count is 3, more than 2"),
    ],
)  # fmt: skip
def test_what_ends_llama_cpp_is_named(
    tmp_path: Path, arch: str, values: Values, words: str
) -> None:
    found = problem(tmp_path / "m.gguf", arch, values)
    assert found == f"{arch}.{words}; fetch it again"


def test_a_scaling_that_is_not_known_is_named(tmp_path: Path) -> None:
    found = problem(tmp_path / "m.gguf", "llama", {"rope.scaling.type": "sideways"})
    assert found == "llama.rope.scaling.type is 'sideways', which llama.cpp does not know"


def test_a_number_given_as_text_is_left_to_llama_cpp(tmp_path: Path) -> None:
    """It reports a wrong type itself."""
    values: Values = {"expert_count": "many", "token_shift_count": "many"}
    assert problem(tmp_path / "m.gguf", "llama", values) is None
