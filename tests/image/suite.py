"""The image, tried for real: whose files it leaves, on which CPUs it runs, and what is in it.

Not part of `make test`: `make image-test` builds the image first, and buildah runs it without an
engine. What runs here is the image's own copy of everything; only traces are read back on the
outside, by Perfetto's own trace_processor.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import tomllib
import urllib.parse
from pathlib import Path

import pytest

from llamacpp_instr import upstream
from tests import trace_processor
from tests.image.container import Image

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

AIM = 350_000_000
"""bytes of all layers, unpacked"""

NOBODY = "54321:54322"
"""ids that neither the image nor this machine has a name for"""

# Every command that reads the demo's log: what to run in /out, and the file that it leaves there.
COMMANDS: tuple[tuple[str, str | None], ...] = (
    ("doctor --json", None),
    ("check session.log", None),
    ("summary session.log", None),
    ("stats session.log --by layer", None),
    ("cat session.log --expand", None),
    ("diff session.log session.log", None),
    ("to-perfetto session.log", "session.pftrace"),
    ("to-perfetto session.log --format json -o session.json", "session.json"),
    ("to-parquet session.log --csv -o tables", "tables/ops.csv"),
)


@pytest.fixture(scope="session")
def image() -> Image:
    return Image(os.environ["IMAGE"])


@pytest.fixture(scope="session")
def out(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caller's directory, with the demo recorded into it by an id without a name."""
    directory = owned(tmp_path_factory.mktemp("out"), NOBODY)
    done = image.run(
        *("run", "demo", "--prompt", "Once upon a time", "-n", "16", "--log", "/out/session.log"),
        user=NOBODY,
        volumes={directory: "/out"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    return directory


def owned(directory: Path, user: str) -> Path:
    """The directory, with `uid:gid` as its owner and closed to others."""
    uid, gid = map(int, user.split(":"))
    os.chown(directory, uid, gid)
    directory.chmod(0o700)
    return directory


def owners(directory: Path) -> set[str]:
    """`uid:gid` of everything in a directory."""
    return {f"{path.stat().st_uid}:{path.stat().st_gid}" for path in directory.rglob("*")}


# --- what it is ---


def test_the_image_is_small(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nthe image holds {image.size / 1e6:.0f} MB, to be {AIM / 1e6:.0f} MB at most")
    assert image.size <= AIM


def test_the_image_says_what_it_is(image: Image) -> None:
    config = image.config
    assert config["Entrypoint"] == ["instr"]
    assert config["User"] == "1000:1000"
    assert config["WorkingDir"] == "/out"
    assert config["StopSignal"] == "SIGINT"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == PROJECT["version"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]
    pin = upstream.read_upstream(upstream.patches_dir())
    assert labels["llamacpp-instr.llama-cpp.commit"] == pin.commit


def test_nothing_of_the_build_is_left(image: Image) -> None:
    with image.mounted() as root:
        for tool in ("cc", "c++", "gcc", "g++", "ld", "make", "cmake", "ninja", "ccache", "pip"):
            places = ("usr/bin", "usr/local/bin", "opt/instr/bin")
            assert not [place for place in places if (root / place / tool).exists()], tool
        for directory in ("var/lib/apt/lists", "root", "tmp", "src", "wheels"):
            left = (root / directory).glob("*")
            assert [path.name for path in left] == [], directory
        packages = next(root.glob("opt/instr/lib/python3*/site-packages"))
        assert not list(packages.glob("pip*"))


def test_everyone_may_read_what_is_installed(image: Image) -> None:
    with image.mounted() as root:
        closed = [
            path
            for path in (root / "opt/instr").rglob("*")
            if not path.is_symlink()
            and path.stat().st_mode & (0o005 if path.is_dir() else 0o004) == 0
        ]
    assert closed == []


# --- whose files it leaves ---


@pytest.mark.parametrize(("command", "leaves"), COMMANDS, ids=lambda value: str(value).split()[0])
def test_a_command_runs_for_an_id_without_a_name(
    image: Image, out: Path, command: str, leaves: str | None
) -> None:
    done = image.run(*command.split(), user=NOBODY, volumes={out: "/out"})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert leaves is None or (out / leaves).stat().st_size > 0
    assert owners(out) == {NOBODY}


def test_a_model_is_read_from_a_volume_that_only_reads(image: Image, tmp_path: Path) -> None:
    models, out = tmp_path / "models", tmp_path / "out"
    models.mkdir()
    (models / "model.gguf").write_bytes((REPOSITORY / "llamacpp_instr/data/demo.gguf").read_bytes())
    out.mkdir()
    arguments = ["run", "/models/model.gguf", "--prompt", "The cat", "--log", "/out/session.log"]
    done = image.run(
        *arguments, user=NOBODY, volumes={models: "/models:ro", owned(out, NOBODY): "/out"}
    )
    assert done.returncode == 0, done.stderr
    assert owners(out) == {NOBODY}
    assert owners(models) == {"0:0"}


def test_the_first_user_of_a_machine_names_no_id(image: Image, tmp_path: Path) -> None:
    done = image.run(
        *("run", "demo", "--prompt", "The cat", "-n", "1"),
        volumes={owned(tmp_path, "1000:1000"): "/out"},
    )
    assert done.returncode == 0, done.stderr
    assert owners(tmp_path) == {"1000:1000"}


def test_a_directory_of_someone_else_is_one_clear_line(image: Image, tmp_path: Path) -> None:
    done = image.run(
        *("run", "demo", "--prompt", "The cat"),
        user=NOBODY,
        volumes={owned(tmp_path, "1000:1000"): "/out"},
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "session.log" in done.stderr


# --- how it answers ---


def test_exit_codes_are_those_of_the_command(image: Image, out: Path) -> None:
    volumes = {out: "/out"}
    assert image.run("--version", user=NOBODY).stdout == f"instr {PROJECT['version']}\n"
    assert image.run(*image.config["Cmd"], user=NOBODY).returncode == 0
    wrong = image.run("run", "/models/none.gguf", "--prompt", "a", user=NOBODY, volumes=volumes)
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    (out / "broken.log").write_text('{"event":"session_start"\n')
    try:
        assert image.run("check", "broken.log", user=NOBODY, volumes=volumes).returncode == 1
    finally:
        (out / "broken.log").unlink()


def test_the_health_check_is_a_command_that_passes(image: Image) -> None:
    kind, *command = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    done = image.run(*command, entrypoint=[], user=NOBODY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["missing"] == {}


def test_a_prompt_comes_through_standard_input(image: Image, tmp_path: Path) -> None:
    done = image.run(
        *("run", "demo", "--prompt", "-", "-n", "1"),
        stdin="The cat",
        user=NOBODY,
        volumes={owned(tmp_path, NOBODY): "/out"},
    )
    assert done.stdout.startswith("The cat"), done.stderr


def test_what_the_demo_leaves_is_whole(image: Image, out: Path) -> None:
    done = image.run("check", "session.log", user=NOBODY, volumes={out: "/out"})
    assert done.returncode == 0, done.stdout
    trace = out / "trace.pftrace"
    made = image.run(
        *("to-perfetto", "session.log", "-o", "trace.pftrace"), user=NOBODY, volumes={out: "/out"}
    )
    assert made.returncode == 0, made.stderr
    for imported in trace_processor.check(trace):
        assert imported["problems"] == []
    [[[kernels]]] = trace_processor.ask(trace, "select count(*) from slice where name = 'MUL_MAT'")
    assert kernels > 0


def test_a_trace_is_shown_on_loopback_of_the_hosts_network(image: Image, out: Path) -> None:
    with image.container() as container:
        server = subprocess.Popen(
            # coreutils' timeout ends it as Ctrl-C does
            ["buildah", "run", "--network", "host", "--user", NOBODY, "--volume", f"{out}:/out"]
            + [container, "--", "timeout", "--signal=INT", "20"]
            + ["instr", "view", "--no-browser", "session.log"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        address = urllib.parse.urlsplit(server.stdout.readline().strip())
        assert address.hostname == "127.0.0.1"
        trace = re.search(r"[?&]url=([^&]+)", address.fragment)
        assert trace is not None
        for path in ("/", urllib.parse.urlsplit(urllib.parse.unquote(trace[1])).path):
            assert address.port is not None
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
            connection.request("GET", path)
            answer = connection.getresponse()
            assert (answer.status, len(answer.read()) > 1000) == (200, True)
            connection.close()
        server.wait(60)


# --- on which CPUs ---

EMULATOR = Path("/usr/bin/qemu-x86_64")


@pytest.mark.parametrize(
    ("cpu", "has", "lacks"),
    [
        ("Nehalem", {"SSE3", "SSSE3"}, {"AVX"}),
        ("SandyBridge", {"AVX"}, {"AVX2", "F16C"}),
        ("Haswell", {"AVX2", "FMA", "F16C"}, {"AVX512"}),
    ],
)
def test_an_older_cpu_gets_kernels_that_it_can_run(
    image: Image, tmp_path: Path, cpu: str, has: set[str], lacks: set[str]
) -> None:
    """Emulated, an instruction that such a CPU lacks ends the process with SIGILL, as it does there.

    What ggml says of itself in the log is what the variant that it loaded was compiled with.
    """
    done = image.run(
        *("run", "demo", "--prompt", "Once upon a time", "-n", "4", "--threads", "2"),
        entrypoint=["/emulator/qemu-x86_64", "-cpu", cpu]
        + ["/usr/bin/python3", "/opt/instr/bin/instr"],
        user=NOBODY,
        volumes={owned(tmp_path, NOBODY): "/out", EMULATOR.parent: "/emulator:ro"},
    )
    assert done.returncode == 0, done.stderr
    features = session_start(tmp_path / "session.log")["host"]["features"]
    assert has <= set(features)
    assert not lacks & set(features)
    assert image.run("check", "session.log", user=NOBODY, volumes={tmp_path: "/out"}).returncode == 0


def test_this_cpu_gets_the_kernels_of_its_generation(out: Path) -> None:
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().partition("flags")[2]))
    features = set(session_start(out / "session.log")["host"]["features"])
    for flag, feature in (("avx2", "AVX2"), ("avx512f", "AVX512"), ("avx512_vnni", "AVX512_VNNI")):
        assert (feature in features) == (flag in flags), feature


def session_start(log: Path) -> dict[str, dict[str, list[str]]]:
    with log.open() as lines:
        start: dict[str, dict[str, list[str]]] = json.loads(next(lines))
    return start
