"""Writes a data set in the layout that `flashinfer_bench.TraceSet.from_path` reads.

definitions/OP_TYPE/NAME.json, workloads/OP_TYPE/NAME.jsonl, and the tensors of workloads in
blob/workloads/OP_TYPE/NAME. `occurrences.json` is ours: how often each workload occurred.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.exports.flashinfer.workloads import Found, Workload

Arrays = Mapping[str, NDArray[Any]]
OUTPUT = "llama.cpp:"
"""before the name of an output among the tensors of a workload"""


def write_tensors(found: Found, folder: Path, workload: Workload, arrays: Arrays) -> None:
    """Writes the tensors of a workload below `folder`: by the names of inputs, or of outputs behind
    `OUTPUT`."""
    from safetensors.numpy import save_file

    path = folder / _blob(found, workload)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, path)


def write_dataset(found: Found, folder: Path, captured: Mapping[str, Collection[str]]) -> None:
    """Writes all files below `folder`, which has nothing but captured tensors: `captured` has their
    names, by the id of their workload."""
    by_name: dict[str, list[Workload]] = {}
    for workload in found.workloads.values():
        by_name.setdefault(workload.name, []).append(workload)
    for definition in found.catalog:
        place = Path(definition.op_type) / definition.name
        _write(folder / "definitions" / place.with_name(f"{place.name}.json"), definition.as_json())
        lines = []
        for workload in by_name[definition.name]:
            stored = captured.get(workload.id, workload.integers)
            if workload.integers and workload.id not in captured:
                write_tensors(found, folder, workload, workload.integers)
            inputs: dict[str, Any] = {}
            for name in definition.inputs:
                if name in workload.scalars:
                    inputs[name] = {"type": "scalar", "value": workload.scalars[name]}
                elif name in stored:
                    inputs[name] = {
                        "type": "safetensors",
                        "path": str(_blob(found, workload)),
                        "tensor_key": name,
                    }
                else:
                    inputs[name] = {"type": "random"}
            whole_ = {"uuid": workload.id, "axes": workload.axes, "inputs": inputs}
            lines.append(
                {
                    "definition": definition.name,
                    "workload": whole_,
                    "solution": None,
                    "evaluation": None,
                }
            )
        file = folder / "workloads" / place.with_name(f"{place.name}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write(folder / "occurrences.json", _occurrences(found))


def _blob(found: Found, workload: Workload) -> Path:
    name = workload.name
    folder = Path("blob", "workloads", found.catalog[name].op_type, name)
    return folder / f"{name}_{workload.id}.safetensors"


def _occurrences(found: Found) -> dict[str, Any]:
    return {
        "workloads": [
            {
                "definition": of.name,
                "uuid": of.id,
                "axes": of.axes,
                "times": of.times,
                "ns": of.ns,
                "at_most": of.at_most,
            }
            for of in found.workloads.values()
        ],
        "without_definition": [
            {"op": op, "times": of.times, "ns": of.ns} for op, of in found.undescribed.items()
        ],
    }


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
