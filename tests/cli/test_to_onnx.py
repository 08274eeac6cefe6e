"""`instr to-onnx` and `instr ops`: what they write, and what they refuse."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import onnx
import pytest

from llamacpp_instr.llama.engine import ContextOptions, ModelContext
from tests.kit.debugger_kit import last_logits, opened
from tests.kit.in_process import instr_here, json_reports, printed, refusal
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.quantized_kit import quantized_demo
from tests.kit.reports import Row

pytestmark = pytest.mark.native
VERBOSE = ROOT / "tests" / "fixtures" / "demo-verbose.log"


def test_onnx_runtime_writes_the_story_that_llama_cpp_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the program that the documentation shows."""
    monkeypatch.chdir(tmp_path)
    printed("to-onnx", "demo", "-o", "decode.onnx")
    page = (ROOT / "docs" / "how-to" / "export-onnx.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, object] = {}
    exec(program, names)
    next_token = names["next_token"]
    assert callable(next_token)

    with opened(DEMO) as model, ModelContext(model, ContextOptions(ctx=256, threads=1)) as context:
        tokens = list(model.tokenize("Once upon a time"))
        n_prompt = len(tokens)
        context.decode(tokens, False)
        for _ in range(30):
            tokens.append(int(last_logits(context).argmax()))
            context.decode(tokens[-1:], False)
    found = tokens[:n_prompt]
    for position in range(n_prompt + 29):
        token = next_token(found[position], position)
        if position >= n_prompt - 1:
            found.append(token)
    assert found == tokens


def test_a_graph_is_whole_and_says_what_each_operator_is(tmp_path: Path) -> None:
    out = tmp_path / "graph.onnx"
    done = instr_here("to-onnx", "demo", "-o", out, "--tokens", 8)
    assert done.returncode == 0, done.stderr
    assert re.search(r"graph.onnx: \d+ operators, 39 weights", done.stderr)
    onnx.checker.check_model(str(out), full_check=True)
    graph = onnx.load(out, load_external_data=False).graph
    (query,) = [node for node in graph.node if node.name == "Qcur-1"]
    assert {of.key: of.value for of in query.metadata_props} == {
        "op": "MUL_MAT", "layer": "1", "block": "attention",
    }  # fmt: skip


def test_without_weights_the_graph_of_a_log_needs_no_model(tmp_path: Path) -> None:
    log = tmp_path / "moved.log"
    log.write_bytes(VERBOSE.read_bytes().replace(b"demo.gguf", b"none.gguf"))
    words = ("to-onnx", log, "-o", tmp_path / "a.onnx")
    assert "--no-weights needs no model file" in refusal(*words)
    printed(*words, "--no-weights", "--step", 1)
    assert [path.name for path in tmp_path.iterdir() if "onnx" in path.name] == ["a.onnx"]
    graph = onnx.load(tmp_path / "a.onnx").graph
    assert {"token_embd.weight", "inp_tokens"} <= {of.name for of in graph.input}


WRONG = {
    "weights into a pipe": (["demo", "-o", "-"], "add --no-weights"),
    "a step of a model": (["demo", "-o", "OUT", "--step", "1"], "--step is for logs"),
    "tokens of a log": ([str(VERBOSE), "-o", "OUT", "--tokens", "2"], "are for models"),
    "a step that is missing": ([str(VERBOSE), "-o", "OUT", "--step", "99"], "no step 99"),
    "a graph with the weights' name": (["demo", "-o", "graph.data"], "have this name"),
    "no model": (["nothing.gguf", "-o", "OUT"], "nothing.gguf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_gets_one_line(case: str, tmp_path: Path) -> None:
    words, message = WRONG[case]
    out = tmp_path / "out.onnx"
    assert message in refusal("to-onnx", *[out if word == "OUT" else word for word in words])
    assert not list(tmp_path.iterdir())


def test_a_log_without_strides_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "detailed.log"
    lines = VERBOSE.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        if event["event"] == "graph":
            del event["nodes"]["nb"]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    line = refusal("to-onnx", log, "-o", tmp_path / "out.onnx", "--no-weights")
    assert "--level verbose" in line


def test_the_ops_of_a_model_are_those_of_its_recording() -> None:
    """Those of a decode; the window of the cache has the same size in both."""
    (_, model), (_, log) = json_reports("ops", "demo"), json_reports("ops", VERBOSE)
    assert model["title"] == log["title"] == "Ops of a decode, 1 token"

    def counted(report: Row) -> Counter[tuple[object, ...]]:
        # the log's cache has 512 cells; that of the dry run has the size of the window
        return Counter(
            (row["op"], row["output"].replace("512", "256"), row["count"], row["weights"])
            for row in report["rows"]
            if row["op"] != "VIEW"
        )

    assert counted(model) == counted(log)


def test_a_model_of_k_quants_is_exported(tmp_path: Path) -> None:
    out = tmp_path / "graph.onnx"
    printed("to-onnx", quantized_demo("Q4_K_M"), "-o", out)
    onnx.checker.check_model(str(out), full_check=True)
