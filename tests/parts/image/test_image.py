"""Tests the image: owners of its files, the CPUs it runs on, and its content.

Not part of `make test`: `make image-test` builds the image first, and buildah runs it without an
engine. Only the image's own programs run, except for Perfetto's trace_processor, which reads the
traces outside of it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamacpp_instr import __version__
from llamacpp_instr.llama.build import source_tree
from tests.kit import trace_processor
from tests.kit.ui_kit import look
from tests.parts.image.container import Image

REPOSITORY = Path(__file__).resolve().parents[3]

AIM = 350_000_000
"""maximum bytes of all layers, uncompressed, without llama.cpp's programs"""
OF_PROGRAMS = 50_000_000
"""maximum bytes of these"""

NOBODY = "54321:54322"
"""ids without a name in the image and on this machine"""

# Every command that reads the demo's log: the command to run in /out, and the file that it writes.
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
    ("inspect demo", None),
    ("report session.log -o report.html", "report.html"),
    ("quantize demo --types Q4_K_M", "demo-Q4_K_M.gguf"),
    ("quality demo demo-Q4_K_M.gguf --chunks 1", None),
    ("compare demo demo-Q4_K_M.gguf -o comparison.html", "comparison.html"),
    ("blocks demo-Q4_K_M.gguf blk.0.ffn_down.weight --heat-map blocks.png", "blocks.png"),
)


@pytest.fixture(scope="session")
def image() -> Image:
    return Image(os.environ["IMAGE"])


@pytest.fixture(scope="session")
def out(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caller's directory, into which an id without a name recorded the demo."""
    directory = owned(tmp_path_factory.mktemp("out"), NOBODY)
    done = image.run(
        *("run", "demo", "--prompt", "Once upon a time", "-n", "16", "--log", "/out/session.log"),
        user=NOBODY,
        volumes={directory: "/out"},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5, "the story goes on"
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


# --- content ---


def test_the_image_is_small(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    with image.mounted() as root:
        files = (root / "opt" / "instr" / "libexec").rglob("*")
        programs = sum(file.lstat().st_size for file in files if file.is_file())
    rest = image.size - programs
    with capsys.disabled():
        print(f"\nthe image has {rest / 1e6:.0f} MB, the limit is {AIM / 1e6:.0f} MB, and programs")
        print(f"of {programs / 1e6:.0f} MB, the limit is {OF_PROGRAMS / 1e6:.0f} MB")
    assert rest <= AIM
    assert 0 < programs <= OF_PROGRAMS


def test_the_image_says_what_it_is(image: Image) -> None:
    config = image.config
    assert config["Entrypoint"] == ["instr"]
    assert config["User"] == "1000:1000"
    assert config["WorkingDir"] == "/out"
    assert config["StopSignal"] == "SIGINT"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "MIT"
    pin = source_tree.read_upstream(source_tree.patches_dir())
    assert labels["llamacpp-instr.llama-cpp.commit"] == pin.commit


def test_nothing_of_the_build_is_left(image: Image) -> None:
    with image.mounted() as root:
        for tool in ("cc", "c++", "gcc", "g++", "ld", "make", "cmake", "ninja", "ccache", "pip"):
            places = ("usr/bin", "usr/local/bin", "opt/instr/bin")
            assert not [place for place in places if (root / place / tool).exists()], tool
        for directory in ("var/lib/apt/lists", "root/.cache", "tmp", "src", "wheels"):
            left = [path.name for path in (root / directory).rglob("*") if path.is_file()]
            assert left == [], directory
        packages = next(root.glob("opt/instr/lib/python3*/site-packages"))
        assert not list(packages.glob("pip*"))


def test_the_programs_have_kernels_for_the_same_cpus_as_the_package(image: Image) -> None:
    """So both stages of the build received the arguments for CMake."""
    places = ("lib/python3*/site-packages/llama_cpp/lib", "libexec/llamacpp-instr")
    with image.mounted() as root:
        package, programs = (
            {path.name for path in root.glob(f"opt/instr/{place}/libggml-cpu*.so")}
            for place in places
        )
    assert package == programs != set()


def test_everyone_may_read_what_is_installed(image: Image) -> None:
    with image.mounted() as root:
        closed = [
            path
            for path in (root / "opt/instr").rglob("*")
            if not path.is_symlink()
            and path.stat().st_mode & (0o005 if path.is_dir() else 0o004) == 0
        ]
    assert closed == []


# --- owners of files ---


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
    owned(tmp_path, "1000:1000").chmod(0o755)
    done = image.run("run", "demo", "--prompt", "a", user=NOBODY, volumes={tmp_path: "/out"})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "session.log" in done.stderr


# --- output and streams ---


def test_exit_codes_are_those_of_the_command(image: Image, out: Path) -> None:
    volumes = {out: "/out"}
    assert image.run("--version", user=NOBODY).stdout == f"instr {__version__}\n"
    assert image.run(*image.config["Cmd"], user=NOBODY).returncode == 0
    wrong = image.run("run", "/models/none.gguf", "--prompt", "a", user=NOBODY, volumes=volumes)
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    cut = (out / "session.log").read_text().rpartition("\n{")[0]
    checked = image.run("check", "-", stdin=cut, user=NOBODY, volumes=volumes)
    assert checked.returncode == 1, checked.stdout


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
    assert done.returncode == 0, done.stderr
    prompts = session_start(tmp_path / "session.log")["args"]["prompts"]
    assert prompts == ["The cat"]


DRAW = """
import matplotlib.figure
axes = matplotlib.figure.Figure().subplots()
axes.imshow([[1, 2], [3, 4]], label="heat")
axes.set_title("tokens, $x^2$")
axes.figure.savefig("chart.svg")
axes.figure.savefig("chart.png")
"""


def test_charts_can_be_drawn_and_nobody_waits_for_a_font_cache(
    image: Image, tmp_path: Path
) -> None:
    volumes = {owned(tmp_path, NOBODY): "/out"}
    done = image.run(DRAW, entrypoint=["python3", "-c"], user=NOBODY, volumes=volumes)
    assert (done.returncode, done.stderr) == (0, "")
    assert "</svg>" in (tmp_path / "chart.svg").read_text()
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


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
    [[[kernels]]] = trace_processor.ask(
        trace, "select count(*) from slice where name glob 'MUL_MAT*'"
    )
    assert kernels > 0


def test_a_trace_is_shown_on_loopback_of_the_hosts_network(image: Image, out: Path) -> None:
    # until a line comes; the shell passes SIGTERM on, and returns the server's status
    serve = "instr view --no-browser session.log & read stop; kill $!; wait $!"
    with image.container() as container:
        server = subprocess.Popen(
            [
                *("buildah", "run", "--network", "host", "--user", NOBODY),
                *("--volume", f"{out}:/out", container, "--", "sh", "-c", serve),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        seen = look(address)
        server.communicate("stop\n", timeout=60)
    assert server.returncode == 0
    assert (seen.loaded, seen.dialog, seen.errors, seen.foreign) == (True, None, [], [])


def test_the_services_of_the_compose_file_work(image: Image, tmp_path: Path) -> None:
    """Entry point and command of each service as written, except for the one that serves."""
    text = (REPOSITORY / "docker/compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"run", "convert", "view", "instr"}
    volumes = {owned(tmp_path, NOBODY): "/out"}
    for name in ("run", "convert", "instr"):
        entry = services[name].get("entrypoint", ["instr"])
        done = image.run(*services[name]["command"], entrypoint=entry, user=NOBODY, volumes=volumes)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"session.log", "session.pftrace"}
    assert services["view"]["network_mode"] == "host"
    assert services["view"]["entrypoint"][:2] == ["instr", "view"]


def test_llama_server_is_recorded_by_a_variable(image: Image, tmp_path: Path) -> None:
    """The image was built with `--build-arg PROGRAMS=1`."""
    serve = """
        model=$(python3 -c "import llamacpp_instr as of; print(of.__path__[0])")/data/demo.gguf
        LLAMA_INSTR_LOG=/out/server.log llama-server -m "$model" -c 256 --port 8123 2> server.txt &
        python3 - <<'END'
import json, time, urllib.request as http
asked = http.Request("http://127.0.0.1:8123/completion", b'{"prompt": "Once", "n_predict": 4}')
for _ in range(300):
    try:
        print(json.load(http.urlopen(asked))["tokens_predicted"])
        break
    except OSError:
        time.sleep(0.1)
END
        kill $!; wait $!
        instr requests server.log --json"""
    done = image.run(
        "-c", serve, entrypoint=["sh"], user=NOBODY, volumes={owned(tmp_path, NOBODY): "/out"}
    )
    assert done.returncode == 0, done.stderr
    n, _, reports = done.stdout.partition("\n")
    assert int(n) == 4
    figures = json.loads(reports)[0]["figures"]
    assert figures["requests"]["value"] == 1
    assert figures["output_tokens"]["value"] == 4


# --- CPUs ---

EMULATOR = "qemu-x86_64-static"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variants of another architecture")
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
    """On an emulated CPU, an instruction that it lacks ends the process, as on the real one.

    ggml's features in the log are those that the loaded variant was compiled with.
    """
    emulator = shutil.which(EMULATOR)
    assert emulator is not None, "apt install qemu-user-static"
    tools, here = tmp_path / "tools", tmp_path / "out"
    tools.mkdir()
    shutil.copy(emulator, tools)
    here.mkdir()
    done = image.run(
        *("run", "demo", "--prompt", "Once upon a time", "-n", "16"),
        entrypoint=[
            f"/tools/{EMULATOR}",
            "-cpu",
            cpu,
            "/opt/instr/bin/python3",
            "-m",
            "llamacpp_instr",
        ],
        user=NOBODY,
        volumes={owned(here, NOBODY): "/out", tools: "/tools:ro"},
    )
    assert done.returncode == 0, done.stderr
    features = session_start(here / "session.log")["host"]["features"]
    assert has <= set(features)
    assert not lacks & set(features)
    checked = image.run("check", "session.log", user=NOBODY, volumes={here: "/out"})
    assert checked.returncode == 0, checked.stdout


def test_this_cpu_gets_the_kernels_of_its_generation(out: Path) -> None:
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().partition("flags")[2]))
    features = set(session_start(out / "session.log")["host"]["features"])
    for flag, feature in (("avx2", "AVX2"), ("avx512f", "AVX512"), ("avx512_vnni", "AVX512_VNNI")):
        assert (feature in features) == (flag in flags), feature


def session_start(log: Path) -> dict[str, Any]:
    with log.open() as lines:
        start: dict[str, Any] = json.loads(next(lines))
    return start
