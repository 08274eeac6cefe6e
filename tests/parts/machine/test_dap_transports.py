"""The port of the debug adapter refuses other users of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.dap_kit import served
from tests.kit.programs import run_python

pytestmark = pytest.mark.native


def test_other_users_of_the_machine_are_refused(tmp_path: Path) -> None:
    connect = (
        "import encodings.idna, os, socket, sys; os.setuid(65534);"
        "print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1))"
    )
    with served(tmp_path) as port:
        assert run_python(connect, port, check=True).stdout == "b''\n"
