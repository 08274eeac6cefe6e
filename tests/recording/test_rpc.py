"""ggml's RPC backend, recorded at both ends of each connection. Servers are processes of their own;
those with a delay are in network namespaces."""

from __future__ import annotations

import re
import socket
import struct
import threading

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama import rpc
from llamacpp_instr.log import schema
from tests.conftest import Instr, assert_refused
from tests.kit.native_kit import patched_tree

pytestmark = pytest.mark.native


def test_the_protocol_is_that_of_the_pinned_llama_cpp() -> None:
    folder = patched_tree() / "ggml"
    header = (folder / "include" / "ggml-rpc.h").read_text()
    versions = re.findall(r"RPC_PROTO_(?:MAJOR|MINOR)_VERSION +(\d+)", header)
    assert tuple(map(int, versions)) == rpc.PROTOCOL
    source = (folder / "src" / "ggml-rpc" / "ggml-rpc.cpp").read_text()
    enum = source.partition("enum rpc_cmd {")[2].partition("RPC_CMD_NONE")[0]
    assert tuple(re.findall(r"RPC_CMD_(\w+)", enum)) == schema.RPC_COMMANDS


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("box", "is not HOST:PORT"),
        ("box:rpc", "is not HOST:PORT"),
        ("127.0.0.1:0", "is not HOST:PORT"),
        ("no-such-host.invalid:50052", "the host 'no-such-host.invalid' is not known"),
        ("127.0.0.1:1", "Connection refused; `instr exec ggml-rpc-server` starts a server"),
    ],
)
def test_an_address_that_cannot_be_used(server: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        rpc.check_server(server)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "is not an RPC server, or is an older one"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nno RPC here", "is not an RPC server"),
        (struct.pack("<QBB26x", 28, 6, 1), "version 6.1 of the protocol, this llama.cpp has 7.0"),
        (struct.pack("<QBB26x", 28, 7, 1), "version 7.1 of the protocol, this llama.cpp has 7.0"),
        (None, "does not answer within 0.2 s"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_used(
    answer: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_SECONDS", 0.2)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            if answer is None:
                stop.wait()
            else:
                connection.recv(33)
                connection.sendall(answer)

    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UsageError, match=re.escape(words)):
            rpc.check_server(f"127.0.0.1:{listener.getsockname()[1]}")
        stop.set()
        thread.join()


def test_without_the_backend_there_is_one_line(instr: Instr) -> None:
    done = instr("run", "demo", "-p", "x", "--rpc", "127.0.0.1:50052")
    assert_refused(done, "--rpc: llama.cpp has no RPC backend; run `instr build --backend rpc`")
