"""No command changes or deletes a file that it was not told to write, not even with --force.

Every command that writes runs in a folder of inputs, of files that only look like the command's
own, and of other files. All of them are compared before and after.
"""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from llamacpp_instr.cli import COMMANDS, main
from llamacpp_instr.converters.exports.tables import NAMES
from llamacpp_instr.converters.exports.torch import NAMES as TORCH
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.prediction.probe.file import probe_json
from llamacpp_instr.recipe.make import VERSION, Recipe, recipe_json
from tests.conftest import Instr, assert_refused, read_events
from tests.kit import tiny_models
from tests.kit.made_machine import made_machine
from tests.kit.made_probe import probe_of
from tests.kit.native_kit import ROOT
from tests.kit.quantize_kit import importances, write_imatrix
from tests.kit.report_names import FASTER, word
from tests.kit.rpc_logs import Server, made_logs

PARTS = [f"split-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
SPLIT = PARTS[0]
MODELS = ["model.gguf", "named.gguf", "linked.gguf", *PARTS]
"""only a log, `named.log`, names the second; the third is a symbolic link to the first"""
OTHER_INPUTS = [
    "session.log", "named.log", "values.log", "probe.json", "engines.toml", "graph.toml",
    "machine.json", "text.txt", "program.py", "server.log", "client.log", "server-a.log",
]  # fmt: skip
TENSOR = "blk.0.attn_q.weight"
PYTHON = word(sys.executable)
RECORDS = "import llama_cpp\nllama_cpp.Llama('model.gguf', n_ctx=32, verbose=False)\n"


@dataclass(frozen=True)
class Case:
    """A command line that writes to `{}`."""

    line: str
    output: str = "out"
    """replaces `{}` if nothing is wrong"""
    creates: tuple[str, ...] = ()
    """the files that it should write; by default the output"""

    @property
    def option(self) -> tuple[str, str]:
        """The command, and its option that names the output."""
        command, *words = shlex.split(self.line)
        option = [command, *words][words.index("{}")]
        return command, "--output" if option == "-o" else option

    @property
    def reads(self) -> set[str]:
        """The inputs in the line."""
        return set(shlex.split(self.line)) & {*MODELS, *OTHER_INPUTS}

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.creates or (self.output,)


EVERY_EVENT = ROOT / "tests" / "fixtures" / "every-event.log"
TABLES = tuple(f"data/{name}.csv" for name in NAMES)
PROFILE = tuple(f"profile/{name}" for name in TORCH)
KEPT = ("kept/model-Q8_0.gguf", "kept/source-1.log", "kept/Q8_0-1.log")
RUN = "-n 1"
OTHER_EXPORTS = ("to-flashinfer", "to-onnx", "to-parquet", "to-torch")
"""exports that write more than one file"""

ALL = [
    *(
        Case(f"{command} session.log -o {{}}")
        for command in (
            "cat", "summary", "stats", "requests", "tree", "page", "ops",
            *(name for name in COMMANDS if name.startswith("to-") and name not in OTHER_EXPORTS),
        )
    ),
    Case("values values.log -o {}"),
    Case("roofline session.log --machine probe.json -o {}"),
    Case("schedule session.log --phase prefill --engines engines.toml -o {}"),
    Case("capacity server.log --clients 1 -o {}"),
    Case("schedule graph.toml -o {}"),
    Case("schedule model.gguf --machine machine.json -o {}"),
    Case("schedule session.log --phase prefill --engines engines.toml --perfetto {}"),
    *(
        Case(f"predict {name} --machine machine.json --batch 4 --ctx 4 -o {{}}")
        for name in ("model.gguf", SPLIT)
    ),
    Case("diff session.log named.log -o {}"),
    Case("merge client.log server-a.log -o {}"),
    Case("to-parquet --csv session.log -o {}", "data", TABLES),
    Case("to-torch session.log -o {}", "profile", PROFILE),
    Case("to-onnx model.gguf -o {}", "out.onnx", ("out.onnx", "out.data")),
    Case("sql fleet logs -o {}"),
    Case("validate model.gguf -n 1 -o {}"),
    Case(f"diverge {SPLIT} model.gguf --text text.txt --tokens 8 -o {{}}"),
    *(Case(f"inspect {name} -o {{}}") for name in ("model.gguf", SPLIT)),
    *(
        Case(f"memory {name} -o {{}}")
        for name in ("model.gguf", SPLIT, "session.log", "named.log")
    ),
    Case(f"compare named.log model.gguf --reference {SPLIT} -o {{}}"),
    Case("compare model.gguf named.gguf --log session.log --log named.log -o {}"),
    Case("compare --types Q8_0 model.gguf --rounds 1 -n 1 --keep {}", "kept", KEPT),
    Case("bench model.gguf -p 2 -n 1 --rounds 1 --logs {}", "kept", ("kept/model-1.log",)),
    Case("bench model.gguf -p 2 -n 1 --rounds 1 --logs logs -o {}",
         creates=("out", "logs", "logs/*")),
    Case(f"quality {SPLIT} model.gguf --text text.txt --ctx 16 --chunks 1 -o {{}}"),
    Case(f"imatrix {SPLIT} --text text.txt --ctx 16 --chunks 1 -o {{}}"),
    Case(f"blocks quantized.gguf {TENSOR} --reference {SPLIT} -o {{}}"),
    Case(f"blocks quantized.gguf {TENSOR} --reference {SPLIT} --heat-map {{}}", "out.svg"),
    Case(f"weights quantized.gguf --reference {SPLIT} -o {{}}"),
    Case("weights quantized.gguf -o {}", "out.npz"),
    Case(f"weights {SPLIT} -o {{}}", "out.safetensors"),
    Case("quantize model.gguf --types Q8_0,F16 -o {}", "kept",
         ("kept/model-Q8_0.gguf", "kept/model-F16.gguf")),
    Case(f"quantize {SPLIT} --types Q8_0 --imatrix imatrix.gguf -o {{}}", "out.gguf"),
    Case("recipe model.gguf --recipe recipe.json -o {}", "out.gguf"),
    Case(f"recipe {SPLIT} --bpw 9 --text text.txt --chunks 1 --threads 1 -o {{}}", "out.gguf",
         ("out.gguf", "out.types.txt", "out.json")),
    Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log {{}}", "old.log"),
    Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log new.log --perfetto {{}}",
         creates=("out", "new.log")),
    Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log new.log --capture l_out-* -o {{}}",
         "captured", ("captured", "captured/*", "new.log")),
    Case(f"debug {SPLIT} -p hello {RUN} --log {{}}", "old.log"),
    *(
        Case(f"exec --log {{}} {rotate} -- {PYTHON} program.py", "old.log",
             ("old.log", "old.part2.log"))
        for rotate in ("", "--rotate 1MB")
    ),
    Case("build --wheel-dir {}", "wheels", ("wheels/*.whl",)),
]  # fmt: skip
CASES = {case.option for case in ALL}
READ_ONLY = {
    ("run", "--prompt-file"), ("compare", "--log"), ("compare", "--reference"),
    ("diverge", "--text"), ("run", "--lora"), ("debug", "--lora"),
    ("imatrix", "--text"), ("quality", "--text"), ("blocks", "--reference"),
    ("quantize", "--imatrix"),
    ("recipe", "--imatrix"), ("recipe", "--text"), ("recipe", "--machine"), ("recipe", "--recipe"),
    ("weights", "--reference"), ("roofline", "--machine"), ("schedule", "--engines"),
    ("schedule", "--machine"), ("predict", "--machine"), ("diff", "--before"), ("diff", "--after"),
    ("import", "--base"), ("validate", "--reference"), ("to-flashinfer", "--dataset"),
    ("probe", "--calibrate"), ("capacity", "--machine"), ("capacity", "--workload"),
}  # fmt: skip
NO_INPUT = {("probe", "--output")}
"""commands that read no file; this one takes a minute"""
PEERS = {("import", "--output")}
"""needs PyTorch; tests/parts/peers runs it"""
NO_FILE = {
    "A,B,...", "ADDRESS", "ARGS", "A[-B]", "BITS", "COLUMN", "DATASET", "HOST:PORT,…",
    "KEY=PATTERN", "KEY[,KEY]", "N", "N,...", "NAME", "NAME,…", "OP,…", "PATTERN",
    "PATTERN=BUFFER", "PATTERN=TYPE", "PERCENT", "SHARE,…", "SIZE", "TEXT", "TOKENS",
    "TYPE", "TYPE,...", "TYPE,…",
}  # fmt: skip
"""metavars of the other options"""


def write_stock(place: Path) -> None:
    """Inputs, files that look like outputs of a command, and other files."""
    tiny_models.write_llama(place / "model.gguf")
    shutil.copyfile(place / "model.gguf", place / "named.gguf")
    (place / "linked.gguf").symlink_to("model.gguf")
    (place / "part.svg").symlink_to(PARTS[1])
    tiny_models.write_llama(place / "split.gguf", part=8)
    assert sorted(path.name for path in place.glob("split*")) == PARTS
    write_imatrix(place / "imatrix.gguf", importances(place / "model.gguf"))
    (place / "text.txt").write_text("hello " * 60)
    (place / "program.py").write_text(RECORDS)
    shutil.copyfile(EVERY_EVENT, place / "values.log")
    for line in (
        f"run model.gguf -p hello {RUN} --log session.log",
        f"run named.gguf -p hello {RUN} --log named.log",
        "quantize model.gguf --types Q8_0 -o quantized.gguf",
        "collect session.log -o fleet",
    ):
        command = [sys.executable, "-m", "llamacpp_instr", *shlex.split(line)]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    made_logs(1, [Server("10.0.0.2")]).write(place)
    (place / "server.log").write_bytes(gzip.decompress(FASTER.read_bytes()))
    (place / "probe.json").write_bytes(probe_json(probe_of()))
    (place / "engines.toml").write_text('[[engine]]\nname = "engine"\ncount = 2\n')
    (place / "graph.toml").write_text('[[task]]\nname = "a"\nns = 10\n')
    weights = load_model_file(place / "model.gguf").n_bytes
    recipe = Recipe(VERSION, "model.gguf", weights, "Q4_0", {})
    (place / "recipe.json").write_bytes(recipe_json(recipe))
    (place / "machine.json").write_bytes(probe_json(made_machine()))
    # outputs of an earlier call, which may be replaced
    for name in ("out", "out.svg", "new.log"):
        (place / name).write_text("old")
    shutil.copyfile(place / "quantized.gguf", place / "out.gguf")
    for name in ("old.log", "new.log"):
        shutil.copyfile(place / "session.log", place / name)
    for name in (*TABLES, *PROFILE):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("old")
    # files of other programs
    for name in (
        "mine.csv", "archive.csv/ops.csv", ".hidden", ".out", "out.1", "out.gguf.part", "core",
        "old2.part2.log", "old7.part9.log", "old-2025.part3.log", "old.partx.log", "xold.part2.log",
        "old.log.gz", "old.part2.log.bak", "old.part2.txt", "old", "demo", "demo.gguf",
        "kept/model.gguf", "kept/notes", "kept/Q8_0-2.log", "kept/model-Q4_0.gguf", "wheels/mine",
    ):  # fmt: skip
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(name)
    (place / "mine.csv").chmod(0o400)
    (place / "old").chmod(0o755)
    (place / "link").symlink_to("mine.csv")
    (place / "to nowhere").symlink_to("nowhere")
    (place / "folder").symlink_to("archive.csv")
    os.mkfifo(place / "pipe")


Files = dict[str, tuple[int, bytes]]


def files(place: Path) -> Files:
    """Every file below a directory: its type and mode, and its content or link target."""
    found = {}
    for path in place.rglob("*"):
        mode, content = path.lstat().st_mode, b""
        if stat.S_ISLNK(mode):
            content = os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        found[path.relative_to(place).as_posix()] = (mode, content)
    return found


def changed(before: Files, after: Files) -> set[str]:
    """The names of files that were created, changed or removed."""
    return {name for name in before | after if before.get(name) != after.get(name)}


pytestmark = pytest.mark.native

TO_TABLES = ("to-parquet", "--csv", "--force")


def test_no_option_that_names_a_file_is_forgotten() -> None:
    found, forced = set(), set()
    for command in COMMANDS:
        loaded = main.get_command(click.Context(main), command)
        assert loaded is not None
        for option in loaded.params:
            if not isinstance(option, click.Option):
                continue
            name = max(option.opts, key=len)
            if name == "--force":
                forced.add(command)
            names_text = isinstance(option.type, (click.types.StringParamType, click.Path))
            if names_text and not option.is_flag and option.metavar not in NO_FILE:
                found.add((command, name))
    # the values of `compare --prompt` and of the cache types have no metavar
    found -= {(c, n) for c, n in found if n == "--prompt" or n.startswith("--cache-type-")}
    assert found == CASES | READ_ONLY | NO_INPUT | PEERS
    assert forced <= {command for command, _ in (*CASES, *NO_INPUT, *PEERS)}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stock")
    write_stock(place)
    return place


@pytest.fixture
def place(stock: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", f"{stock}/.", tmp_path], check=True)
    return tmp_path


@pytest.fixture
def refused(place: Path, instr: Instr) -> Callable[..., None]:
    """Checks that a command says why it is refused, and that it changes no file."""

    def check(words: Sequence[str], *messages: str) -> None:
        before = files(place)
        assert_refused(instr(*words), *messages)
        assert changed(before, files(place)) == set()

    return check


def stderr_of(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def ids(case: object) -> str | None:
    return case.line.replace(PYTHON, "python") if isinstance(case, Case) else None


@pytest.mark.parametrize("case", ALL, ids=ids)
def test_nothing_else_is_written(case: Case, place: Path, instr: Instr) -> None:
    before = files(place)
    command, *words = shlex.split(case.line.format(case.output))
    force = () if command == "build" else ("--force",)  # build has none: a wheel has its digest
    done = instr(command, *force, *words)
    assert done.returncode == 0, stderr_of(done)
    others = changed(before, files(place))
    assert {
        name for name in others if not any(Path(name).match(output) for output in case.outputs)
    } == set()
    assert others, "it wrote its output"


def inputs(case: Case) -> set[str]:
    """Files that the output of a command must not replace."""
    if case.option == ("blocks", "--heat-map"):
        return {"part.svg"}  # other suffixes are refused anyway
    if case.option[0] == "quantize":
        return {SPLIT, PARTS[1]}  # a model may replace any other model
    if case.option[0] == "recipe":
        return {SPLIT, PARTS[1]} if SPLIT in case.line else {"model.gguf", "linked.gguf"}
    return case.reads | {"linked.gguf", "named.gguf", PARTS[1]}


INPUTS = [
    (case, name)
    for number, case in enumerate(ALL)
    if case.output not in ("data", "kept", "wheels")
    for name in sorted(inputs(case))
    # another name of an input: once for each command
    if name in case.reads or case.option[0] not in {other.option[0] for other in ALL[:number]}
]


@pytest.mark.parametrize(("case", "name"), INPUTS, ids=ids)
def test_no_input_is_written_over(case: Case, name: str, refused: Callable[..., None]) -> None:
    """Another part of an input, and a model that an input names, count as inputs."""
    command, *words = shlex.split(case.line.format(name))
    why = ["name another"] if case.option[1] != "--log" else []
    refused([command, "--force", *words], name, *why)


@pytest.mark.parametrize(
    "line",
    [
        "quantize model.gguf --types Q8_0 --imatrix imatrix.gguf -o imatrix.gguf",
        f"quantize {SPLIT} --types Q8_0 -o ./../{{}}/{PARTS[2]}",
        "compare --types Q8_0 model.gguf --reference kept/model-Q8_0.gguf --keep kept",
    ],
)
def test_no_input_is_written_over_by_a_model(
    line: str, place: Path, refused: Callable[..., None]
) -> None:
    shutil.copyfile(place / "quantized.gguf", place / "kept" / "model-Q8_0.gguf")
    words = [*shlex.split(line.format(place.name)), "--force"]
    refused(words, "would overwrite the input", "name another")


@pytest.mark.parametrize(
    "line", ["cat -", "stats -", "report -", "to-perfetto -", "diff old.log -"]
)
def test_no_input_that_was_redirected_is_written_over(
    line: str, place: Path, environment: dict[str, str]
) -> None:
    before = files(place)
    with (place / "session.log").open() as log:
        done = subprocess.run(
            [
                sys.executable, "-m", "llamacpp_instr", *shlex.split(line), "-o", "session.log",
                "--force",
            ],
            cwd=place, env=environment, stdin=log, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert_refused(done, "session.log would overwrite the input standard input; name another file")
    assert changed(before, files(place)) == set()


@pytest.mark.parametrize(
    "name", ["mine.csv", "archive.csv/a", "ops.csv/a", "session.csv", ".hidden", "ops.csv.bak"]
)
def test_a_directory_of_tables_that_holds_anything_else_is_left_alone(
    name: str, place: Path, refused: Callable[..., None]
) -> None:
    (place / "data" / "ops.csv").unlink()
    (place / "data" / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(place / "session.log", place / "data" / name)
    for log in ("session.log", f"data/{name}"):
        why = f"data contains another file ({name.partition('/')[0]})"
        refused([*TO_TABLES, log, "-o", "data"], why, "name another")


@pytest.mark.parametrize("link", [False, True])
def test_a_table_that_is_no_regular_file_is_left_alone(
    link: bool, place: Path, refused: Callable[..., None]
) -> None:
    table = place / "data" / "ops.csv"
    table.unlink()
    if link:
        table.symlink_to("../mine.csv")
    else:
        os.mkfifo(table)
    why = "data contains another file (ops.csv)"
    refused([*TO_TABLES, "session.log", "-o", "data"], why, "name another")


def test_a_log_with_the_name_of_a_table_is_left_alone(
    place: Path, refused: Callable[..., None]
) -> None:
    shutil.copyfile(place / "session.log", place / "data" / "ops.csv")
    why = "data/ops.csv would overwrite the input data/ops.csv"
    refused([*TO_TABLES, "data/ops.csv", "-o", "data"], why, "name another")


def test_the_directory_of_tables_keeps_its_mode_and_the_link_to_it(
    place: Path, instr: Instr
) -> None:
    (place / "data").chmod(0o700)
    (place / "to data").symlink_to("data")
    before = files(place)
    done = instr(*TO_TABLES, "session.log", "-o", "to data")
    assert done.returncode == 0, stderr_of(done)
    assert changed(before, files(place)) == set(TABLES)


@pytest.mark.parametrize(
    "line",
    [
        f"run model.gguf -p {'hello' * 400} {RUN} --log {{}}",
        f"run model.gguf -p hello --chat {RUN} --log {{}}",
        "exec --log {} -- ./missing",
        "exec --log {} -- true",
        f"exec --log {{}} --rotate 1MB -- {PYTHON} -c pass",
    ],
    ids=lambda line: line.replace(PYTHON, "python")[-60:],
)
def test_a_command_that_records_nothing_leaves_the_log_of_another(
    line: str, place: Path, instr: Instr
) -> None:
    before = files(place)
    command, *words = shlex.split(line.format("old.log"))
    stderr_of(instr(command, "--force", *words))
    assert changed(before, files(place)) == set()


@pytest.mark.parametrize("name", ["text.txt", "program.py", "mine.csv", "demo", "model.gguf"])
@pytest.mark.parametrize(
    "line",
    [
        f"run model.gguf -p hello {RUN} --log",
        f"exec -- {PYTHON} program.py",
        f"exec --rotate 1MB -- {PYTHON} program.py",
    ],
    ids=lambda line: line.replace(PYTHON, "python"),
)
def test_only_a_log_is_replaced_by_a_log(
    line: str, name: str, refused: Callable[..., None]
) -> None:
    command, *words = shlex.split(line.removesuffix(" --log"))
    refused([command, "--force", "--log", name, *words], name)


def test_a_log_and_its_trace_are_two_files(place: Path, instr: Instr) -> None:
    done = instr("run", "demo", "-p", "x", "--log", "a", "--perfetto", "./a")
    assert_refused(done, "cannot contain both the log and the trace")
    assert not (place / "a").exists()


def test_the_log_that_names_a_model_does(place: Path) -> None:
    (event,) = read_events(place / "named.log", "model")
    assert Path(event["path"]).name == "named.gguf"


LONGEST = list(
    {
        (case.output, case.creates): case
        for case in reversed(ALL)
        if (case.option[0], case.output) != ("quantize", "kept")
        and "out.types.txt" not in case.creates  # its name is longer than the model's
    }.values()
)
"""the first command of each kind of output"""


@pytest.mark.parametrize("length", [255, 256])
@pytest.mark.parametrize(
    "case",
    LONGEST,
    ids=ids,
)
def test_the_longest_name_is_written_and_a_longer_one_refused(
    case: Case, length: int, place: Path, instr: Instr
) -> None:
    suffix = Path(case.output).suffix if case.option[0] != "exec" else ""
    name = "n" * (length - len(suffix)) + suffix
    (place / "new.log").unlink()
    before = files(place)
    command, *words = shlex.split(case.line.format(name))
    done = instr(command, *words)
    if length == 255:
        assert done.returncode == 0, stderr_of(done)
        return
    assert done.returncode in (1, 2)
    (error,) = stderr_of(done).splitlines()
    assert error.startswith("Error: ")
    assert "File name too long" in error
    assert changed(before, files(place)) == set()
