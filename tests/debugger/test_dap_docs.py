"""docs/how-to/debug-in-an-editor.md: editors and the adapter accept its configurations."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.debugger.dap.variables import Variables, picture
from llamacpp_instr.run.debugging import KEYS
from tests.kit import dap_kit
from tests.kit.commands_kit import one_line
from tests.kit.native_kit import ROOT

PAGE = (ROOT / "docs" / "how-to" / "debug-in-an-editor.md").read_text()
EXTENSION, LAUNCH = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.S))
(ADAPTER,) = EXTENSION["contributes"]["debuggers"]
(CONFIGURATION,) = LAUNCH["configurations"]

RUNS = [one_line("docs/reference/commands.md", "instr debug demo --dap-port 4711")]


def test_the_extension_starts_what_the_configuration_names() -> None:
    assert ADAPTER["type"] == CONFIGURATION["type"]
    assert (ADAPTER["runtime"], ADAPTER["args"]) == ("instr", ["debug", "--dap"])


def test_neovim_gets_the_same_configuration() -> None:
    (lua,) = re.findall(r"```lua\n(.*?)```", PAGE, re.S)
    (words,) = re.findall(r'command = "(\w+)", args = \{ (.*?) \}', lua)
    assert [words[0], *re.findall(r'"(.*?)"', words[1])] == ["instr", *ADAPTER["args"]]
    pairs = re.findall(r"^    (\w+) = (.*),$", lua, re.M)
    assert {name: json.loads(value) for name, value in pairs} == CONFIGURATION


def test_every_key_is_on_the_page() -> None:
    section = PAGE.partition("## Keys of a launch configuration")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", section)
    assert [key for key in KEYS if key not in named] == []
    assert set(CONFIGURATION) - {"type", "request", "name"} <= set(KEYS)


def test_every_field_of_our_own_request_is_on_the_page() -> None:
    section = PAGE.partition("## One request of our own")[2]
    drawn = picture(np.zeros((2, 3), np.float32), "", 64, 256, 40)
    parts = (drawn, drawn["figures"], drawn["histogram"], drawn["heatMap"])
    _self, *asked = signature(Variables.do_instr_tensor).parameters
    named = re.findall(r"`(\w+)`", section)
    fields = [*asked, *(key for part in parts for key in part)]
    assert [name for name in fields if name not in named] == []


@pytest.mark.native
def test_the_configuration_runs_as_an_editor_starts_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *ADAPTER["args"]],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        client = dap_kit.Client(process.stdout, process.stdin)
        assert dap_kit.launch(client, **CONFIGURATION)["reason"] == "entry"
        client.request("disconnect")
        assert process.wait(dap_kit.WAIT) == 0


@pytest.mark.native
def test_the_example_listens_at_its_port(tmp_path: Path) -> None:
    (line,) = RUNS
    command = [sys.executable, "-m", "llamacpp_instr", *line.text.split()[1:]]
    with dap_kit.served(tmp_path, command) as port:
        assert port == int(line.text.split()[-1])
