"""`instr ops` and `instr to-onnx` of a log."""

from __future__ import annotations

from pathlib import Path

from converters.analyses.ops import ops_of_log
from converters.exports.onnx.export import export_graph
from converters.exports.onnx.weights import with_weights_as_inputs
from llamacpp_instr.errors import InstrError
from llamacpp_instr.graph.copies import without_copies
from llamacpp_instr.log.session import load_session
from tests.fuzz.guard import check_message, check_reports

KIND = "log"


def attempt(path: Path) -> None:
    session = load_session(path)
    try:
        check_reports(ops_of_log(session))
    except InstrError as error:
        check_message(error)
    for graph in session.graphs.values():
        if graph.nodes is not None and graph.nodes.nb is not None:
            whole = without_copies(graph)
            with_weights_as_inputs(export_graph(whole), whole).SerializeToString()
