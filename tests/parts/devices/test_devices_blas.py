"""The kernels of BLAS, which computes in its caller, are those of the first thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.kit.backends import blas_module
from tests.kit.device_logs import check_coverage, kernels_of, record_on, splits_of
from tests.kit.native_kit import DEMO, random_model

pytestmark = pytest.mark.native


MODELS = ["llama4-moe", "gemma3-dense", "deepseek2-moe", "qwen3next-moe", "mamba-dense"]


@pytest.mark.parametrize(
    ("level", "name"),
    [("detailed", "demo"), ("verbose", "demo"), *(("detailed", name) for name in MODELS)],
)
def test_every_node_is_timed_once_and_no_logit_changes(
    tmp_path: Path, level: str, name: str
) -> None:
    model = DEMO if name == "demo" else random_model(name)
    session = record_on([blas_module()], tmp_path / "blas.log", model, level=level)
    assert session.equal is True
    events = session.events()
    assert check_coverage(events).keys() == {""}
    backends = {
        split["backend"]: kernels.graph["nodes"]["op"][split["start"] : split["end"]]
        for kernels in kernels_of(events)
        for split in kernels.graph["splits"]
    }
    assert {"CPU", "BLAS"} == backends.keys()
    assert "MUL_MAT" in backends["BLAS"]
    assert session.events("device") == [], "it has no clock of its own"
    assert events[-1]["dropped_ops"] == 0
    assert list(check_log(session.log)) == []


def test_its_kernels_lie_in_its_splits(tmp_path: Path) -> None:
    events = record_on([blas_module()], tmp_path / "blas.log", DEMO).events()
    splits = splits_of(events)
    found = 0
    for kernels in kernels_of(events):
        for number, split in enumerate(kernels.graph["splits"]):
            if split["backend"] == "BLAS":
                begin, end = splits[kernels.compute["compute"], number]
                for first, span in zip(kernels.firsts, kernels.spans, strict=True):
                    if split["start"] <= first < split["end"]:
                        assert begin - 1 <= span[0] <= span[1] <= end + 1  # each is rounded
                        found += 1
    assert found > 10
