"""`instr to-flashinfer`: definitions, workloads and coverage.

tests/parts/peers/test_flashinfer.py loads such a data set with flashinfer-bench and runs the
references.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from llamacpp_instr.converters.exports.flashinfer.definition import Catalog, Definition
from llamacpp_instr.converters.exports.flashinfer.uses import View, views_of_mask
from llamacpp_instr.converters.exports.flashinfer.workloads import OUTPUT
from llamacpp_instr.converters.validate.follow import error_of
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr, assert_refused
from tests.kit.in_process import titled
from tests.kit.native_kit import random_model
from tests.kit.reported import Row

LOG = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"
DECODES = 23
TOLERANCE = 5e-4  # NMSE, as test-backend-ops allows


@pytest.fixture
def dataset(instr: Instr, tmp_path: Path) -> Path:
    done = instr("to-flashinfer", LOG, "-o", "dataset")
    assert done.returncode == 0, done.stderr
    return tmp_path / "dataset"


def definitions(dataset: Path) -> dict[str, Row]:
    return {path.stem: json.loads(path.read_bytes()) for path in dataset.rglob("definitions/*/*")}


def workloads(dataset: Path) -> dict[str, list[Row]]:
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in dataset.rglob("workloads/*/*.jsonl")
    }


def test_definitions_have_the_names_of_the_published_data_set(dataset: Path) -> None:
    found = definitions(dataset)
    assert set(found) == {
        "gemm_n256_k256", "gemm_n128_k256", "gemm_n768_k256", "gemm_n256_k768", "gemm_n1024_k256",
        "rmsnorm_h256", "fused_add_rmsnorm_h256", "rope_h4_d64", "rope_h2_d64",
        "silu_and_mul_h768", "embedding_v1024_d256", "gather_d256",
        "gqa_paged_decode_h4_kv2_d64_ps1", "gqa_ragged_prefill_causal_h4_kv2_d64",
    }  # fmt: skip
    gemm = found["gemm_n768_k256"]
    assert gemm["axes"] == {
        "M": {"type": "var"},
        "N": {"type": "const", "value": 768},
        "K": {"type": "const", "value": 256},
    }
    assert gemm["inputs"]["B"] == {"shape": ["N", "K"], "dtype": "float16"}
    assert gemm["tags"] == ["weights:f16"]
    assert "EPS = 9.99999974" in found["rmsnorm_h256"]["reference"], "the model's own"


def test_a_reference_takes_the_inputs_by_their_names(dataset: Path) -> None:
    for name, definition in definitions(dataset).items():
        (run,) = (
            of
            for of in ast.parse(definition["reference"]).body
            if isinstance(of, ast.FunctionDef) and of.name == "run"
        )
        assert [of.arg for of in run.args.args] == list(definition["inputs"]), name
        axes = set(definition["axes"])
        for tensor in (definition["inputs"] | definition["outputs"]).values():
            assert axes >= set(tensor["shape"] or ())


def test_sizes_are_those_that_occurred(dataset: Path) -> None:
    found = workloads(dataset)
    sizes = [of["workload"]["axes"] for of in found["gemm_n768_k256"]]
    assert sizes == [{"M": 5}, {"M": 1}]
    decodes = [of["workload"]["axes"] for of in found["gqa_paged_decode_h4_kv2_d64_ps1"]]
    assert [of["num_kv_indices"] for of in decodes] == list(range(6, 6 + DECODES))
    (prefill,) = found["gqa_ragged_prefill_causal_h4_kv2_d64"]
    assert prefill["workload"]["axes"] == {"total_q": 5, "total_kv": 5, "len_indptr": 2}


def test_indices_are_valid_and_the_rest_is_random(dataset: Path) -> None:
    for name, lines in workloads(dataset).items():
        for line in lines:
            for key, of in line["workload"]["inputs"].items():
                if of["type"] != "safetensors":
                    continue
                assert key in ("indices", "positions", "qo_indptr", "kv_indptr", "kv_indices"), name
                values = load_file(dataset / of["path"])[of["tensor_key"]]
                assert values.dtype == np.int32
                assert values.min() >= 0


def test_occurrences_add_up_to_the_kernels_of_the_log(dataset: Path, instr: Instr) -> None:
    found = json.loads((dataset / "occurrences.json").read_bytes())
    session = load_session(LOG)
    every = [*found["workloads"], *found["without_definition"]]
    assert sum(of["ns"] for of in every) == sum(
        int(of.dur.sum()) for of in session.ops if of.thread == 0
    )
    stats, *_ = json.loads(instr("stats", LOG, "--json").stdout)
    by_op = {row["op"]: row for row in stats["rows"]}
    products = [of for of in found["workloads"] if of["definition"].startswith("gemm")]
    assert sum(of["times"] for of in products) == by_op["MUL_MAT f16"]["count"]
    assert sum(of["ns"] for of in products) == by_op["MUL_MAT f16"]["total"]
    (rows,) = found["without_definition"]
    assert rows == {"op": "SET_ROWS", "times": by_op["SET_ROWS"]["count"],
                    "ns": by_op["SET_ROWS"]["total"]}  # fmt: skip
    assert not any(of["at_most"] for of in found["workloads"])


def test_the_same_log_gives_the_same_files(dataset: Path, instr: Instr, tmp_path: Path) -> None:
    instr("to-flashinfer", LOG, "-o", "again")
    again = tmp_path / "again"
    for path in dataset.rglob("*.*"):
        assert path.read_bytes() == (again / path.relative_to(dataset)).read_bytes()


def test_coverage_by_a_data_set(dataset: Path, instr: Instr) -> None:
    definition = dataset / "definitions" / "gemm" / "gemm_n768_k256.json"
    changed = json.loads(definition.read_bytes())
    changed["axes"]["K"]["value"] = 1
    definition.write_text(json.dumps(changed))
    (dataset / "definitions" / "rmsnorm" / "rmsnorm_h256.json").unlink()
    done = instr("to-flashinfer", LOG, "-o", "other", "--dataset", dataset, "--json")
    (report,) = titled(json.loads(done.stdout))
    rows = {row["definition"]: row for row in report["rows"]}
    assert rows["gemm_n768_k256"]["in the data set"] == "K differ"
    assert rows["rmsnorm_h256"]["in the data set"] == "definition not found"
    assert rows["SET_ROWS"]["in the data set"] == "definition not found"
    assert rows["gemm_n256_k256"]["in the data set"] == "found"
    covered = sum(row["time"] for row in rows.values() if row["in the data set"] == "found")
    figures = {name: of["value"] for name, of in report["figures"].items()}
    assert figures["covered"] == covered / figures["time of all kernels"]


def test_what_cannot_be_done_is_one_line(dataset: Path, instr: Instr, tmp_path: Path) -> None:
    assert_refused(instr("to-flashinfer", LOG, "-o", dataset), "name another directory")
    (tmp_path / "empty").mkdir()
    refused = instr("to-flashinfer", LOG, "-o", "new", "--dataset", "empty")
    assert_refused(refused, "empty is not a data set of flashinfer-bench")
    (dataset / "definitions" / "gemm" / "gemm_n768_k256.json").write_text("{}")
    refused = instr("to-flashinfer", LOG, "-o", "new", "--dataset", dataset)
    assert_refused(refused, "gemm_n768_k256.json is not a definition")
    minimal = tmp_path / "minimal.log"
    lines = LOG.read_text().splitlines(keepends=True)
    minimal.write_text("".join(line for line in lines if '"event":"ops"' not in line))
    refused = instr("to-flashinfer", minimal, "-o", "new")
    assert_refused(refused, "no kernels; record with --level detailed")
    assert not (tmp_path / "new").exists()


def _definition(eps: str) -> Definition:
    return Definition("rmsnorm_h8", "rmsnorm", "", {}, (), {}, {}, f"EPS = {eps}", f"eps{eps}")


def test_a_second_definition_of_a_name_gets_its_variant() -> None:
    catalog = Catalog()
    names = [catalog.add(_definition(eps)) for eps in ("1e-6", "1e-5", "1e-6", "1e-5")]
    assert names == ["rmsnorm_h8", "rmsnorm_h8_eps1e-5"] * 2
    assert [of.name for of in catalog.values()] == names[:2]


def shown(*rows: str) -> NDArray[np.bool_]:
    return np.array([[cell == "x" for cell in row] for row in rows])


@pytest.mark.parametrize(
    ("mask", "views"),
    [
        (shown("x...", "xx..", "xxx."), [View(3, (0, 1, 2))]),
        (shown("xxx..", "xxxx.", "xxxxx"), [View(3, (0, 1, 2, 3, 4))]),
        (shown("xx..", ".xx.", "..xx"), [View(3, (0, 1, 2, 3), 2)]),
        (shown("xx...", "xxx.."), [View(2, (0, 1, 2))]),
        (shown("x.x.."), [View(1, (0, 2))]),
        (shown("xx..", "..xx"), [View(1, (0, 1)), View(1, (2, 3))]),
        (shown("xxx", "xxx"), [View(2, (0, 1, 2), causal=False)]),
        # a request with a window and one without have no common definition
        (
            shown("x....", "xx...", "..xx.", "...xx"),
            [View(1, (0,)), View(1, (0, 1)), View(1, (2, 3)), View(1, (3, 4))],
        ),
    ],
    ids=["causal", "after a cache", "window", "continued", "one", "two", "both sides", "mixed"],
)
def test_what_a_mask_shows(mask: NDArray[np.bool_], views: list[View]) -> None:
    found = views_of_mask(mask)
    assert [(of.queries, tuple(of.cells), of.window, of.causal) for of in found] == [
        (of.queries, tuple(of.cells), of.window, of.causal) for of in views
    ]


def captured(folder: Path, name: str, number: int = 0) -> dict[str, NDArray[Any]]:
    """The tensors of a workload."""
    workload = workloads(folder)[name][number]["workload"]
    (path,) = {of["path"] for of in workload["inputs"].values() if "path" in of}
    return load_file(folder / path)


def attended(scores: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """(heads, cells) and (cells, heads, width), as (heads, width)."""
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    found: NDArray[Any] = np.einsum("hn,nhd->hd", shares, values)
    return found


@pytest.mark.native
def test_captured_tensors_are_those_of_the_model(instr: Instr, tmp_path: Path) -> None:
    instr("run", "demo", "-p", "Once upon a time", "-n", 3, "--log", "session.log")
    done = instr("to-flashinfer", "session.log", "-o", "dataset", "--capture")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "dataset"
    gemm = captured(folder, "gemm_n768_k256")
    assert gemm["A"].shape[1] == 256
    expected = gemm["A"] @ gemm["B"].astype(np.float32).T
    assert error_of(gemm[f"{OUTPUT}C"], expected) < TOLERANCE
    rows = captured(folder, "embedding_v1024_d256")
    assert np.array_equal(rows[f"{OUTPUT}output"], rows["weight"][rows["indices"]])
    decode = captured(folder, "gqa_paged_decode_h4_kv2_d64_ps1")
    cells = decode["kv_indices"]
    keys, values = (
        decode[name][cells, 0].repeat(2, axis=1).astype(np.float32)
        for name in ("k_cache", "v_cache")
    )
    scores = np.einsum("hd,nhd->hn", decode["q"][0], keys) / 8
    assert error_of(decode[f"{OUTPUT}output"][0], attended(scores, values)) < TOLERANCE


@pytest.mark.native
@pytest.mark.parametrize(("n", "at_most"), [(3, False), (40, True)])
def test_a_window_is_not_known_where_it_hides_and_two_caches_look_alike(
    instr: Instr, tmp_path: Path, n: int, at_most: bool
) -> None:
    """The model's window has 32 cells."""
    model = random_model("gemma3-dense")
    instr("run", model, "-p", "a", "-n", n, "--ctx", 256, "--log", "session.log")
    assert instr("to-flashinfer", "session.log", "-o", "dataset").returncode == 0
    found = json.loads((tmp_path / "dataset" / "occurrences.json").read_bytes())
    attention = [of for of in found["workloads"] if of["definition"].startswith("gqa")]
    assert attention
    assert any(of["at_most"] for of in attention) == at_most


@pytest.mark.native
def test_latent_attention_is_captured_in_its_parts(instr: Instr, tmp_path: Path) -> None:
    model = random_model("deepseek2-moe")
    instr("run", model, "-p", "Once upon a time there was a", "-n", 2, "--log", "session.log")
    done = instr("to-flashinfer", "session.log", "-o", "dataset", "--capture")
    assert done.returncode == 0, done.stderr
    folder, name = tmp_path / "dataset", "mla_paged_decode_h1_ckv512_kpe64_ps1"
    decode, cells = captured(folder, name), captured(folder, name)["kv_indices"]
    latent = decode["ckv_cache"][cells, 0].astype(np.float32)
    scores = decode["q_nope"][0] @ latent.T
    scores += decode["q_pe"][0] @ decode["kpe_cache"][cells, 0].astype(np.float32).T
    inputs = workloads(folder)[name][0]["workload"]["inputs"]
    expected = attended(scores * inputs["sm_scale"]["value"], latent[:, None])
    assert error_of(decode[f"{OUTPUT}output"][0], expected) < TOLERANCE
