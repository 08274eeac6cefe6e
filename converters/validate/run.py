"""Runs a model, checks its ops, its logits and its cache, and makes tables of what was found.

The whole graph of the prefill is also computed by ONNX Runtime. Nothing but the tokens, positions,
masks and the empty cache comes from llama.cpp then, so an error in the wiring of the graph shows in
the logits.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress, counted
from llamacpp_instr.converters.exports.onnx.export import (
    export_graph,
    weight_bytes,
    with_external_weights,
)
from llamacpp_instr.converters.validate.follow import (
    Array,
    Checked,
    Checker,
    error_of,
    open_session,
    rounds,
    run,
)
from llamacpp_instr.converters.validate.live import (
    check_only_decodes,
    followed,
    prompt_tokens,
    weight_reader,
)
from llamacpp_instr.debugger.capture import CollectedLogits
from llamacpp_instr.lab.weights.measure import LeafWeights
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import LlamaLog
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.report.report import Cell, Column, Report, columns_of


def compare_logits(
    file: ModelFile, graph: Graph, inputs: Mapping[int, Array], logits: Array
) -> tuple[float | None, str]:
    """Computes a graph from its inputs, by leaf, and compares the last row of its last value with
    `logits`, (vocabulary,). Returns the normalized mean squared error, or why it was not
    computed."""
    exported = export_graph(graph)
    if exported.missing:
        return None, f"no standard operators express {', '.join(sorted(exported.missing))}"
    needed = weight_bytes(exported, graph)
    with temporary_directory("instr-validate-") as folder:
        free = shutil.disk_usage(folder).free
        if needed > free:
            return None, (
                f"its weights need {needed / 1e9:,.1f} GB of disk, but {folder.parent} has"
                f" {free / 1e9:,.1f} GB; set TMPDIR"
            )
        path = folder / "graph.onnx"
        with (folder / "graph.data").open("wb") as data:
            model = with_external_weights(
                exported, graph, LeafWeights(file), "graph.data", data, lambda _n, _of: None
            )
        path.write_bytes(model.SerializeToString())
        leaf = {name: number for number, name in exported.inputs.items()}
        last = exported.names[max(exported.names)]
        found = run(open_session(str(path)), [last], lambda name: inputs[leaf[name]])
        return error_of(found.reshape(-1, found.shape[-1])[-1], logits), ""


OF_LOGITS = 2e-3
"""the error that test-backend-ops allows for a whole model (`test_llama`)"""


@dataclass(frozen=True)
class Validation:
    ops: list[Checked]
    cache: list[float]
    """of each decode: the error of its logits against those of one pass over all tokens, which
    reads nothing from the cache"""
    whole: tuple[float | None, str] | None = None
    """the error of the prompt's logits against those of the whole graph (`compare_logits`)"""


def validate_model(
    file: ModelFile,
    prompt: str | None,
    decodes: int,
    options: ContextOptions,
    log: LlamaLog,
    on_progress: OnProgress,
) -> Validation:
    """Computes a prompt, or tokens of the vocabulary, and `decodes` tokens more, and checks
    every op. `on_progress` gets computes done and in total. Raises `UsageError` for a model that
    has no logits, and for a weight whose type has no conversion to numbers."""
    numbers = weight_reader(file)
    found: list[Checked] = []
    with LoadedModel(file.path, log) as model:
        check_only_decodes(model)
        tokens = prompt_tokens(model, prompt)
        n = len(tokens) + decodes
        options = replace(options, ctx=options.ctx or n, batch=n, ubatch=n)
        collected, checker = CollectedLogits(), Checker(numbers, found.append)
        with followed(model, options, checker, witnesses=[collected]) as made:
            for step in range(decodes + 1):
                made.decode(tokens[-1:] if step else tokens)
                tokens.append(int(np.nan_to_num(collected.rows[-1]).argmax()))
                on_progress(step + 1, decodes + 3)
        with ModelContext(model, options) as context:
            context.decode(tokens[:-1], all_logits=True)
            rows = (context.api.llama_get_logits_ith(context.handle, i) for i in range(n))
            one_pass = [np.ctypeslib.as_array(row, (model.n_vocab,)).copy() for row in rows]
    on_progress(decodes + 2, decodes + 3)
    cache = [
        error_of(row, one_pass[len(one_pass) - decodes + i])
        for i, row in enumerate(collected.rows[1:])
    ]
    assert checker.first is not None
    whole = compare_logits(file, checker.first, checker.first_inputs, collected.rows[0])
    on_progress(decodes + 3, decodes + 3)
    return Validation(found, cache, whole)


ROUNDED = 10
"""times the tolerance of logits that rounded activations may cost: the demo model in Q4_K_M reaches
twice the tolerance, and a wrongly wired graph hundreds of times"""


@dataclass(frozen=True)
class Verdict:
    """The reports, and whether all errors are within their tolerance."""

    reports: list[Report]
    passed: bool


def judge(found: Validation) -> Verdict:
    """A row for each op, its types and its device, the worst first; then the cache."""
    kinds: dict[tuple[str, str, str], list[Checked]] = {}
    for op in found.ops:
        kinds.setdefault((op.op, op.types, op.device), []).append(op)
    rows = [_row(*kind, of) for kind, of in kinds.items()]
    rows.sort(key=lambda row: 1.0 if row[4] is None else -float(row[4]) / float(row[5] or 1))
    columns = [
        *columns_of("text", "op", "sources", "device"),
        Column("checked", "count"),
        *columns_of("number", "largest error", "tolerance"),
        *columns_of("text", "at", "verdict"),
    ]
    if all(op.device == "CPU" for op in found.ops):
        del columns[2]
        rows = [[*row[:2], *row[3:]] for row in rows]
    unknown = sorted({str(row[0]) for row in rows if row[-1] == "not checked"})
    table = Report("Ops, each from the inputs that it had", columns, rows, labels=2, key="ops")
    table.notes.append(
        "The error is the normalized mean squared error against ONNX Runtime in float32; the"
        " tolerance is that of llama.cpp's test-backend-ops."
    )
    if unknown:
        table.notes.append(f"No standard operators express {', '.join(unknown)}.")
    n_faults = sum(op.is_fault for op in found.ops)
    table.notes.append(
        f"Of {counted(len(found.ops), 'op')}, {n_faults:,} are beyond the tolerance."
    )
    if any(row[-1] == "rounding" for row in rows):
        table.notes.append(
            "rounding: ggml rounds activations to 8 bits before a product with quantized weights;"
            " with the same rounding the error is within the tolerance."
        )
    table.figures = {"checked": (len(found.ops), "count"), "faults": (n_faults, "count")}
    reports = [table]
    if found.whole is not None:
        products = (op for op in found.ops if op.op.startswith("MUL_MAT"))
        rounded = any(rounds(op.types.split(", ")[0]) for op in products)
        reports.append(_whole(*found.whole, rounded))
    if found.cache:
        reports.append(_cache(found.cache))
    passed = all(row[-1] != "fault" for report in reports for row in report.rows)
    return Verdict(reports, passed)


def _row(op: str, types: str, device: str, of: Sequence[Checked]) -> list[Cell]:
    known = [(one.error / one.tolerance, one) for one in of if one.error is not None]
    if not known:
        return [op, types, device, len(of), None, None, None, "not checked"]
    faults = [(ratio, one) for ratio, one in known if one.is_fault]
    ratio, worst = max(faults or known, key=lambda pair: pair[0])
    verdict = "fault" if faults else "rounding" if ratio > 1 else "ok"
    return [op, types, device, len(of), worst.error, worst.tolerance, worst.name, verdict]


def _whole(error: float | None, reason: str, rounded: bool) -> Report:
    columns = [Column("error", "number"), Column("tolerance", "number"), Column("verdict")]
    title = "Logits of the prompt against the whole graph in ONNX Runtime"
    if error is None:
        report = Report(title, columns, [[None, None, "not checked"]], key="prompt")
        report.notes.append(f"The graph was not computed: {reason}.")
        return report
    within = error <= OF_LOGITS
    explained = rounded and error <= ROUNDED * OF_LOGITS
    verdict = "ok" if within else "rounding" if explained else "fault"
    report = Report(title, columns, [[error, OF_LOGITS, verdict]], key="prompt")
    report.figures = {"error": (error, "number")}
    if verdict == "rounding":
        report.notes.append(
            "rounding: ggml rounds activations to 8 bits before products with quantized weights,"
            f" which the graph does not. Up to {ROUNDED} times the tolerance is allowed for it."
        )
    return report


def _cache(errors: Sequence[float]) -> Report:
    columns = [
        Column("decode", "count"), *columns_of("number", "error", "tolerance"), Column("verdict"),
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [i + 1, error, OF_LOGITS, "ok" if error <= OF_LOGITS else "fault"]
        for i, error in enumerate(errors)
    ]
    title = "Logits with the cache against one pass without it"
    report = Report(title, columns, rows, key="cache")
    report.figures = {"largest error": (max(errors), "number")}
    return report
