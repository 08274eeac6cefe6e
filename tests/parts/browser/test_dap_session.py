"""The debug adapter with a real model and Microsoft's client, which runs in Node.js."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import TensorStats
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr
from tests.kit import dap_kit
from tests.kit.dap_kit import Client, MicrosoftClient, Refused, figures, is_whole, launch, scope

pytestmark = pytest.mark.native


@pytest.fixture
def client(tmp_path: Path) -> Iterator[MicrosoftClient]:
    """Microsoft's client for tests of debug adapters."""
    with dap_kit.microsoft(tmp_path) as client:
        yield client


def stop_at(client: Client | MicrosoftClient) -> tuple[str, int]:
    """The name of the innermost frame, and its line."""
    frame = client.request("stackTrace", threadId=1)["stackFrames"][0]
    return frame["name"].split(" = ")[0], frame["line"]


def listing(client: Client | MicrosoftClient, reference: int = 1) -> list[str]:
    text: str = client.request("source", sourceReference=reference)["content"]
    return text.splitlines()


def line_of(client: Client | MicrosoftClient, name: str) -> int:
    """Where an op is in the first listing."""
    at = (i for i, line in enumerate(listing(client), 1) if line.strip().startswith(f"{name}:"))
    return next(at)


def launch_to(client: Client | MicrosoftClient, place: str, **arguments: Any) -> None:
    """Run the demo model to the first op that matches a breakpoint."""
    launch(client, stopOnEntry=True, **arguments)
    client.request("setFunctionBreakpoints", breakpoints=[{"name": place}])
    assert go(client)["reason"] == "function breakpoint"


def elements(client: MicrosoftClient, reference: int, **page: int) -> list[dict[str, Any]]:
    """The indexed variables of a variable."""
    found: list[dict[str, Any]] = client.request(
        "variables", variablesReference=reference, filter="indexed", **page
    )["variables"]
    return found


def go(
    client: Client | MicrosoftClient, command: str = "continue", **arguments: str
) -> dict[str, object]:
    client.request(command, threadId=1, **arguments)
    return client.wait_for("stopped", "terminated")


def test_a_session_from_launch_to_disconnect(client: MicrosoftClient, tmp_path: Path) -> None:
    entry = launch(client, stopOnEntry=True)
    assert entry["reason"] == "entry"
    name, line = stop_at(client)
    assert listing(client)[line - 1].strip().startswith(f"{name}: ")
    at = line_of(client, "ffn_out-1")
    asked = {"source": {"sourceReference": 1}, "breakpoints": [{"line": at}]}
    (placed,) = client.request("setBreakpoints", **asked)["breakpoints"]
    assert placed["verified"]
    assert placed["line"] == at
    stopped = go(client)
    assert stopped["reason"] == "breakpoint"
    assert stopped["hitBreakpointIds"] == [placed["id"]]
    assert stop_at(client) == ("ffn_out-1", at)
    frames = client.request("stackTrace", threadId=1)["stackFrames"]
    assert [frame["name"] for frame in frames[1:3]] == ["feed-forward", "layer 1"]
    assert frames[3]["name"].startswith("step 0: ")
    go(client)
    frames = client.request("stackTrace", threadId=1)["stackFrames"]
    assert frames[0]["name"].startswith("ffn_out-1"), "it holds in the graph of a decode too"
    assert frames[3]["name"] == "step 1: 1 token"
    client.request("disconnect")
    assert is_whole(tmp_path / "debug.log")


def test_a_breakpoint_that_an_editor_kept_waits_for_its_graph(client: MicrosoftClient) -> None:
    """As an editor sends it: a path, before there is a listing."""
    place = {"path": "dap-src://7/1/graph-1", "line": 30, "verified": False}
    call = client.begin(
        "hitBreakpoint", {"prompt": "Once upon a time", "n": 2}, place,
        {"path": "graph-1", "line": 30}, {"line": 30},
    )  # fmt: skip
    assert client.wait_for("breakpoint")["breakpoint"]["verified"]
    client.end(call)


def test_conditions_and_hits_decide_where_it_stops(client: MicrosoftClient) -> None:
    launch(client, stopOnEntry=True)
    point = {"name": "ffn_out-*", "condition": "absmax > 0", "hitCondition": "2"}
    (placed,) = client.request("setFunctionBreakpoints", breakpoints=[point])["breakpoints"]
    assert placed["verified"]
    assert go(client)["reason"] == "function breakpoint"
    assert stop_at(client)[0] == "ffn_out-1"
    at = line_of(client, "ffn_out-2")
    wrong = {"line": at, "condition": "absmax < 0"}
    source = {"sourceReference": 1}
    client.request("setBreakpoints", source=source, breakpoints=[wrong])
    client.request("setFunctionBreakpoints", breakpoints=[])
    assert go(client) == {}, "neither stops any more"


def test_steps_end_with_the_op_block_layer_or_decode(client: MicrosoftClient) -> None:
    launch(client, stopOnEntry=True)
    _, line = stop_at(client)
    assert go(client, "stepIn")["reason"] == "step"
    ops = [line for line in listing(client) if line.startswith(" ")]
    assert listing(client)[stop_at(client)[1] - 1] == ops[1]
    go(client, "next")
    text, line = listing(client), stop_at(client)[1]
    assert text[line].startswith("# "), "the next line is the heading of another block"
    go(client, "stepOut")
    text, line = listing(client), stop_at(client)[1]
    assert "layer 0" in client.request("stackTrace", threadId=1)["stackFrames"][2]["name"]
    assert text[line].startswith("# layer 1"), text[line]
    go(client, "next", granularity="decode")
    assert stop_at(client)[1] == len(text)


def test_values_are_those_that_the_recorder_summarizes(
    client: MicrosoftClient, instr: Instr, tmp_path: Path
) -> None:
    words = ("--prompt", "Once upon a time", "-n", 3, "--threads", 1, "--stats", "^ffn_out-1$")
    assert instr("run", "demo", *words).returncode == 0
    events = read_events(tmp_path / "session.log")
    recorded = [event for _, event in events if isinstance(event, TensorStats)]
    launch_to(client, "ffn_out-1")
    for number, stats in enumerate(recorded):
        assert number == 0 or go(client)["reason"] == "function breakpoint"
        seen = figures(client)
        for name in ("min", "max", "mean"):
            assert float(seen[name]) == pytest.approx(getattr(stats, name), rel=1e-5), name
        assert (seen["nan"], seen["inf"]) == ("0", "0")
    assert len(recorded) == 3


def test_elements_come_by_page_and_agree_with_the_figures(client: MicrosoftClient) -> None:
    launch_to(client, "ffn_out-1")
    result = scope(client, "Result")
    rows = elements(client, result["variablesReference"])
    assert len(rows) == result["indexedVariables"]
    values = []
    for row in rows:
        for start in range(0, row["indexedVariables"], 50):
            page = elements(client, row["variablesReference"], start=start, count=50)
            assert page[0]["name"] == f"[{start}]"
            values += [float(one["value"]) for one in page]
    seen = figures(client)
    assert max(values) == pytest.approx(float(seen["max"]), rel=1e-5)
    assert sum(values) / len(values) == pytest.approx(float(seen["mean"]), rel=1e-4)


def test_a_changed_logit_decides_the_next_token(client: MicrosoftClient, tmp_path: Path) -> None:
    launch_to(client, "result_output", n=1)
    result = scope(client, "Result")["variablesReference"]
    changed = client.request("setVariable", variablesReference=result, name="[300]", value="1e6")
    assert float(changed["value"]) == 1e6
    assert figures(client)["max"] == "1e+06"
    go(client)
    assert load_session(tmp_path / "debug.log").tokens["id"].tolist() == [300]
    printed = "".join(body["output"] for name, body in client.events if name == "output")
    assert "running again without the changes, for comparison" in printed
    assert "KL divergence, nats" in printed


def test_a_source_of_the_same_name_is_another_tensor(client: MicrosoftClient) -> None:
    """RoPE reads a tensor `Kcur-1`, and its result has the same name."""
    launch_to(client, "Kcur-1 op=ROPE")
    before = figures(client)
    sources = scope(client, "Sources")["variablesReference"]
    read = client.request("variables", variablesReference=sources)["variables"]
    assert [one["name"] for one in read] == ["Kcur-1", "inp_pos"]
    client.request("setVariable", variablesReference=sources, name="Kcur-1", value="7")
    assert figures(client) == before
    (source, _) = client.request("variables", variablesReference=sources)["variables"]
    rows = elements(client, source["variablesReference"], count=1)
    assert rows[0]["value"] == "7.0, 7.0, 7.0, 7.0, …"


def test_a_line_of_two_ops_with_one_name_is_one_of_them(client: MicrosoftClient) -> None:
    """Both norms of a layer are called `norm-1`."""
    launch(client, stopOnEntry=True)
    lines = [i for i, line in enumerate(listing(client), 1) if line.strip().startswith("norm-1:")]
    point = {"line": lines[1]}
    client.request("setBreakpoints", source={"sourceReference": 1}, breakpoints=[point])
    for _ in range(3):
        go(client)
        assert stop_at(client)[1] == lines[1]
    assert len(lines) == 2


def test_a_nan_stops_as_an_exception(client: MicrosoftClient) -> None:
    launch_to(client, "ffn_out-1")
    client.request("setExceptionBreakpoints", filters=["nan"])
    rows = scope(client, "Result")["variablesReference"]
    changed = client.request("setVariable", variablesReference=rows, name="[0]", value="nan")
    assert "nan" in changed["value"]
    stopped = go(client)
    assert stopped["reason"] == "exception"
    assert stopped["text"] == f"NaN in {stop_at(client)[0]}"
    assert int(figures(client)["nan"]) > 0
    client.request("setExceptionBreakpoints", filters=[])


def test_the_console_takes_the_commands_of_a_stop(client: MicrosoftClient) -> None:
    def say(line: str) -> str:
        result: str = client.request("evaluate", expression=line, context="repl")["result"]
        return result

    launch(client, stopOnEntry=True)
    assert "lens [TOKEN]: the logit lens" in say("help")
    assert say("break ffn_out-1").startswith("breakpoint 1: ffn_out-1")
    say("continue")
    assert client.wait_for("continued")
    assert client.wait_for("stopped")["reason"] == "breakpoint"
    assert "' Once'" in say("tokens")
    assert "n 256" in say("print [0]")
    assert float(figures(client)["max"]) < 1e3
    say("set 1e3 [0, 5]")
    assert float(figures(client)["max"]) == 1e3, "it is read again"
    seen = client.request("evaluate", expression="ffn_out-1", context="hover")
    assert seen["type"] == "F32[5×256]"
    assert seen["indexedVariables"] == 5
    say("delete 1")
    say("step decode")
    assert client.wait_for("stopped")["reason"] == "step"


def test_a_tensor_comes_as_figures_a_histogram_and_a_heat_map(client: MicrosoftClient) -> None:
    launch_to(client, "ffn_out-1")
    drawn = client.call("customRequest", "instr/tensor", {"rows": 3, "columns": 8, "bins": 10})
    seen = figures(client)
    assert drawn["shape"] == [5, 256]
    assert drawn["figures"]["n"] == sum(drawn["histogram"]["counts"]) == 5 * 256
    cells = [cell for row in drawn["heatMap"]["cells"] for cell in row]
    assert len(cells) == 3 * 8
    assert max(map(abs, cells)) == pytest.approx(float(seen["absmax"]), rel=1e-5)
    one = client.call("customRequest", "instr/tensor", {"slice": "[4, 7]"})
    assert (one["shape"], one["figures"]["n"]) == ([1], 1)
    with pytest.raises(Refused, match="rows: Expected int >= 1"):
        client.call("customRequest", "instr/tensor", {"rows": 0})


def test_the_expression_of_a_variable_gives_the_variable(client: MicrosoftClient) -> None:
    launch_to(client, "Kcur-1 op=ROPE")
    names = []
    for one in client.request("scopes", frameId=1)["scopes"]:
        found = client.request("variables", variablesReference=one["variablesReference"])
        for variable in found["variables"]:
            assert variable["type"]
            expression = variable.get("evaluateName")
            if expression is None:
                continue
            names.append(expression)
            seen = client.request("evaluate", expression=expression, context="watch")
            assert seen["type"] == variable["type"]
            if "[" in expression:
                assert seen["result"] == variable["value"]
    assert "inp_pos" in names
    assert "Kcur-1[4]" in names, "an element of the result"
    assert "Kcur-1" not in names, "the source has the name of the result"
    for wrong in ("Kcur-1[5]", "Kcur-1[0][0][0][0][0]"):
        with pytest.raises(Refused, match="does not exist: Kcur-1 is F32"):
            client.request("evaluate", expression=wrong)


def test_the_number_of_a_breakpoint_is_its_id(client: MicrosoftClient) -> None:
    launch(client, stopOnEntry=True)
    client.request("setExceptionBreakpoints", filters=["nan"])
    point = {"line": line_of(client, "ffn_out-1")}
    kept = {"source": {"name": "graph-9"}, "breakpoints": [{"line": 3}]}
    client.request("setBreakpoints", **kept)
    asked = {"source": {"sourceReference": 1}, "breakpoints": [point]}
    (placed,) = client.request("setBreakpoints", **asked)["breakpoints"]
    assert go(client)["text"].startswith(f"breakpoint {placed['id']}: ")
    listed = client.request("evaluate", expression="break", context="repl")["result"]
    assert [line.partition(":")[0] for line in listed.splitlines()] == ["1", str(placed["id"])]


def test_a_running_model_can_be_paused(client: MicrosoftClient) -> None:
    call = client.begin("waitForEvent", "stopped")
    client.request("initialize", adapterID="llamacpp-instr")
    client.request("launch", prompt="Once upon a time", n=100_000, ctx=16384)
    client.request("configurationDone")
    client.wait_for("output")
    client.request("pause", threadId=1)
    assert client.end(call)["reason"] == "pause"
    assert stop_at(client)[1] <= 2
    with pytest.raises(Refused, match="no tensor 'nothing'"):
        client.request("evaluate", expression="nothing")
