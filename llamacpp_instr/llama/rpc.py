"""Servers of ggml's RPC backend as devices of this process.

ggml ends the process if a server cannot be used, so each is asked first, with the first command of
its protocol. A server serves one client at a time.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama import native

PROTOCOL = (7, 0)
"""major and minor version of the protocol: ggml/include/ggml-rpc.h"""

_HELLO, _CAPABILITIES = 14, bytes(24)
_SECONDS = 10
"""for an answer"""

_GGML: native.Signatures = {
    "ggml_backend_reg_by_name": (ctypes.c_void_p, [ctypes.c_char_p]),
    "ggml_backend_reg_get_proc_address": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "ggml_backend_register": (None, [ctypes.c_void_p]),
}
_registered: set[str] = set()


def add_servers(servers: Sequence[str]) -> None:
    """Make the devices of these servers, `HOST:PORT`, devices of this process, as llama.cpp's
    programs do. Raises `UsageError` if there is no RPC backend, or a server cannot be used."""
    new = [server for server in servers if server not in _registered]
    if not new:
        return
    ggml = native.declare(_GGML, native.import_llama_cpp().llama_cpp._lib)
    backend = ggml.ggml_backend_reg_by_name(b"RPC")
    if not backend:
        raise UsageError("--rpc: llama.cpp has no RPC backend; run `instr build --backend rpc`")
    address = ggml.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server")
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    for server in new:
        check_server(server)
        _registered.add(server)
        ggml.ggml_backend_register(add(server.encode()))


def check_server(server: str) -> None:
    """Raise `UsageError`, which says what to do, unless an RPC server of this llama.cpp's protocol
    answers at `HOST:PORT`."""
    host, _, port = server.partition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rpc {server!r} is not HOST:PORT, such as 10.0.0.2:50052")
    try:
        # ggml knows no IPv6
        address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        raise UsageError(f"--rpc {server}: the host {host!r} is not known") from None
    try:
        with socket.create_connection((str(address), int(port)), _SECONDS) as connection:
            version = _version(connection)
    except TimeoutError:
        raise UsageError(
            f"--rpc {server} does not answer within {_SECONDS} s; is it serving another client? A "
            "server serves one at a time"
        ) from None
    except OSError as error:
        raise UsageError(
            f"--rpc {server}: {error.strerror}; `instr exec ggml-rpc-server` starts a server"
        ) from None
    if version is None:
        raise UsageError(f"--rpc {server}: what answers is not an RPC server, or is an older one")
    if version[0] != PROTOCOL[0] or version[1] > PROTOCOL[1]:
        raise UsageError(
            f"--rpc {server}: the server has version {version[0]}.{version[1]} of the protocol, "
            f"this llama.cpp has {PROTOCOL[0]}.{PROTOCOL[1]}; build both from the same release"
        )


def _version(connection: socket.socket) -> tuple[int, int] | None:
    """Major and minor version of the protocol that the server answers with, None for anything
    else."""
    connection.sendall(struct.pack("<BQ", _HELLO, len(_CAPABILITIES)) + _CAPABILITIES)
    size = 4 + len(_CAPABILITIES)
    answer = b""
    while len(answer) < 8 + size:
        piece = connection.recv(8 + size - len(answer))
        if not piece:
            return None
        answer += piece
    if struct.unpack_from("<Q", answer)[0] != size:
        return None
    return answer[8], answer[9]
