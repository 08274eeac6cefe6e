"""The debug adapter with a real model: what a client sees, and what its requests do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import dap_kit

pytestmark = pytest.mark.native


def test_only_an_error_of_a_request_of_the_user_pops_up(tmp_path: Path) -> None:
    with dap_kit.piped(tmp_path) as (client, _):

        def answer(command: str, **arguments: object) -> tuple[str, bool]:
            reply = client.take(client.ask(command, arguments))
            return reply["message"], reply["body"]["error"]["showUser"]

        client.request("initialize", adapterID="llamacpp-instr")
        assert answer("launch", prompt="a", ctx=0)[1]
        assert answer("evaluate", expression="a", context="hover")[1:] == (False,)
        client.request("launch", prompt="Once upon a time", n=1)
        client.request("configurationDone")
        client.wait_for("terminated")
        assert answer("evaluate", expression="a") == ("the run has ended; launch it again", False)
        assert answer("variables", variablesReference=1)[0] == "the run has ended; launch it again"
        assert answer("next", threadId=1)[1]
