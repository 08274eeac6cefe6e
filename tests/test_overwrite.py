"""No command changes or deletes a file that it was not told to write, not even with --force.

Around every command that writes lies a folder of inputs, of files that only look as if they were
the command's own, and of other people's. All of it is compared before and after.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from converters.table import NAMES
from llamacpp_instr.cli import COMMANDS, main
from tests import tiny_models
from tests.conftest import Instr, assert_refused, read_events
from tests.quantize_kit import importances, write_imatrix

PARTS = [f"split-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
SPLIT = PARTS[0]
MODELS = ["model.gguf", "named.gguf", "linked.gguf", *PARTS]
"""the second is named by a log only, `named.log`; the third is a symbolic link to the first"""
TENSOR = "blk.0.attn_q.weight"
RECORDS = "import llama_cpp\nllama_cpp.Llama('model.gguf', n_ctx=32, verbose=False)\n"


@dataclass(frozen=True)
class Case:
    """A command line that writes to `{}`."""

    line: str
    output: str = "out"
    """what `{}` stands for, when nothing is wrong"""
    reads: tuple[str, ...] = ()
    """inputs beside models"""
    creates: tuple[str, ...] = ()
    """the files that it is told to write; the output when left out"""

    @property
    def told(self) -> tuple[str, ...]:
        return self.creates or (self.output,)


TABLES = tuple(f"data/{name}.csv" for name in NAMES)
KEPT = ("kept/model-Q8_0.gguf", "kept/source-1.log", "kept/Q8_0-1.log")
RUN = "-n 1"

# by the option that says where the output goes
CASES: dict[tuple[str, str], list[Case]] = {
    ("cat", "--output"): [Case("cat session.log -o {}", reads=("session.log",))],
    ("stats", "--output"): [Case("stats session.log -o {}", reads=("session.log",))],
    ("diff", "--output"): [
        Case("diff session.log named.log -o {}", reads=("session.log", "named.log"))
    ],
    ("to-perfetto", "--output"): [Case("to-perfetto session.log -o {}", reads=("session.log",))],
    ("to-parquet", "--output"): [
        Case("to-parquet --csv session.log -o {}", "data", ("session.log",), TABLES)
    ],
    ("inspect", "--output"): [Case(f"inspect {name} -o {{}}") for name in ("model.gguf", SPLIT)],
    ("report", "--output"): [
        *[Case(f"report {name} -o {{}}") for name in ("model.gguf", SPLIT)],
        *[Case(f"report {name} -o {{}}", reads=(name,)) for name in ("session.log", "named.log")],
    ],
    ("compare", "--output"): [
        Case(f"compare named.log model.gguf --reference {SPLIT} -o {{}}", reads=("named.log",)),
        Case("compare model.gguf named.gguf --log session.log --log named.log -o {}",
             reads=("session.log", "named.log")),
    ],
    ("compare", "--keep"): [
        Case("compare --types Q8_0 model.gguf --rounds 1 -n 1 --keep {}", "kept", creates=KEPT)
    ],
    ("quality", "--output"): [
        Case(f"quality {SPLIT} model.gguf --text text.txt --ctx 16 --chunks 1 -o {{}}",
             reads=("text.txt",)),
    ],
    ("blocks", "--output"): [Case(f"blocks quantized.gguf {TENSOR} --reference {SPLIT} -o {{}}")],
    ("blocks", "--heat-map"): [
        Case(f"blocks quantized.gguf {TENSOR} --reference {SPLIT} --heat-map {{}}", "out.svg")
    ],
    ("quantize", "--output"): [
        Case("quantize model.gguf --types Q8_0,F16 -o {}", "kept",
             creates=("kept/model-Q8_0.gguf", "kept/model-F16.gguf")),
        Case(f"quantize {SPLIT} --types Q8_0 --imatrix imatrix.gguf -o {{}}", "out.gguf"),
    ],
    ("run", "--log"): [
        Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log {{}}", "old.log", ("text.txt",)),
    ],
    ("run", "--perfetto"): [
        Case(f"run {SPLIT} --prompt-file text.txt {RUN} --log new.log --perfetto {{}}",
             reads=("text.txt",), creates=("out", "new.log")),
    ],
    ("exec", "--log"): [
        Case(f"exec --log {{}} {rotate} -- {sys.executable} program.py", "old.log",
             ("program.py",), ("old.log", "old.part2.log"))
        for rotate in ("", "--rotate 1MB")
    ],
    ("build", "--wheel-dir"): [Case("build --wheel-dir {}", "wheels", creates=("wheels/*.whl",))],
}  # fmt: skip
READ_ONLY = {
    ("run", "--prompt-file"), ("compare", "--log"), ("compare", "--reference"),
    ("quality", "--text"), ("blocks", "--reference"), ("quantize", "--imatrix"),
}  # fmt: skip
NO_FILE = {
    "A,B,...", "ARGS", "A[-B]", "A[:B]", "N", "NAME", "OP,…", "PATTERN", "PERCENT", "REGEX=TYPE",
    "SIZE", "TEXT", "TOKENS", "TYPE", "TYPE,…",
}  # fmt: skip
"""what the help calls the values of the other options"""
ALL = [(option, case) for option, cases in CASES.items() for case in cases]


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
    # `compare --prompt` and the types of a cache have no name for their values
    found -= {(c, n) for c, n in found if n == "--prompt" or n.startswith("--cache-type-")}
    assert found == set(CASES) | READ_ONLY
    assert forced <= {command for command, _ in CASES}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, what looks like the outputs of a command, and other files."""
    place = tmp_path_factory.mktemp("stock")
    tiny_models.write_llama(place / "model.gguf")
    shutil.copyfile(place / "model.gguf", place / "named.gguf")
    (place / "linked.gguf").symlink_to("model.gguf")
    (place / "part.svg").symlink_to(PARTS[1])
    tiny_models.write_llama(place / "split.gguf", part=8)
    assert sorted(path.name for path in place.glob("split*")) == PARTS
    write_imatrix(place / "imatrix.gguf", importances(place / "model.gguf"))
    (place / "text.txt").write_text("hello " * 60)
    (place / "program.py").write_text(RECORDS)
    for line in (
        f"run model.gguf -p hello {RUN} --log session.log",
        f"run named.gguf -p hello {RUN} --log named.log",
        "quantize model.gguf --types Q8_0 -o quantized.gguf",
    ):
        command = [sys.executable, "-m", "llamacpp_instr", *line.split()]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    # outputs of an earlier call, which are to be replaced
    for name in ("out", "out.svg", "new.log"):
        (place / name).write_text("old")
    shutil.copyfile(place / "quantized.gguf", place / "out.gguf")
    for name in ("old.log", "new.log"):
        shutil.copyfile(place / "session.log", place / name)
    for name in TABLES:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("old")
    # other people's files
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
    return place


@pytest.fixture
def place(stock: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", f"{stock}/.", tmp_path], check=True)
    return tmp_path


Files = dict[str, tuple[int, bytes]]


def files(place: Path) -> Files:
    """Every file below a directory: its type and mode, its content or where it leads."""
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
    """The names of files that were made, changed or removed."""
    return {name for name in before | after if before.get(name) != after.get(name)}


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def ids(case: object) -> str | None:
    return case.line.replace(sys.executable, "python") if isinstance(case, Case) else None


@pytest.mark.parametrize(("option", "case"), ALL, ids=ids)
def test_nothing_else_is_written(
    option: tuple[str, str], case: Case, place: Path, instr: Instr
) -> None:
    force = () if option[0] == "build" else ("--force",)  # it has none: a wheel has its digest
    before = files(place)
    command, *words = case.line.format(case.output).split()
    done = instr(command, *force, *words)
    assert done.returncode == 0, said(done)
    others = changed(before, files(place))
    assert {
        name for name in others if not any(Path(name).match(told) for told in case.told)
    } == set()
    assert others, "it has written what it was told to"


def inputs(option: tuple[str, str], case: Case) -> set[str]:
    """What the output of a command must not replace."""
    if option == ("blocks", "--heat-map"):
        return {"part.svg"}  # any other suffix is refused for itself
    of_line = {name for name in MODELS if name in case.line} | set(case.reads)
    if option[0] == "quantize":
        return {SPLIT, PARTS[1]}  # any other model may be replaced by a model
    return of_line | {"linked.gguf", "named.gguf", PARTS[1]}


INPUTS = [
    (option, case, name)
    for option, case in ALL
    if case.output not in ("data", "kept", "wheels")
    for name in sorted(inputs(option, case))
]


@pytest.mark.parametrize(("option", "case", "name"), INPUTS, ids=ids)
def test_no_input_is_written_over(
    option: tuple[str, str], case: Case, name: str, place: Path, instr: Instr
) -> None:
    """Nor another part of an input, nor a model that an input names."""
    before = files(place)
    command, *words = case.line.format(name).split()
    done = instr(command, "--force", *words)
    assert_refused(done, name, *(["name another"] if option[1] != "--log" else []))
    assert changed(before, files(place)) == set()


@pytest.mark.parametrize(
    "line",
    [
        "quantize model.gguf --types Q8_0 --imatrix imatrix.gguf -o imatrix.gguf",
        f"quantize {SPLIT} --types Q8_0 -o ./../{{}}/{PARTS[2]}",
        "compare --types Q8_0 model.gguf --reference kept/model-Q8_0.gguf --keep kept",
    ],
)
def test_no_input_is_written_over_by_a_model(line: str, place: Path, instr: Instr) -> None:
    shutil.copyfile(place / "quantized.gguf", place / "kept" / "model-Q8_0.gguf")
    before = files(place)
    done = instr(*line.format(place.name).split(), "--force")
    assert_refused(done, "would overwrite the input", "name another")
    assert changed(before, files(place)) == set()


@pytest.mark.parametrize(
    "line", ["cat -", "stats -", "report -", "to-perfetto -", "diff old.log -"]
)
def test_no_input_that_was_redirected_is_written_over(
    line: str, place: Path, environment: dict[str, str]
) -> None:
    before = files(place)
    with (place / "session.log").open() as log:
        done = subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *line.split(), "-o", "session.log", "--force"],
            cwd=place, env=environment, stdin=log, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert_refused(done, "session.log would overwrite the input standard input; name another file")
    assert changed(before, files(place)) == set()


@pytest.mark.parametrize(
    "name", ["mine.csv", "archive.csv/a", "ops.csv/a", "session.csv", ".hidden", "ops.csv.bak"]
)
def test_a_directory_of_tables_that_holds_anything_else_is_left_alone(
    name: str, place: Path, instr: Instr
) -> None:
    (place / "data" / "ops.csv").unlink()
    (place / "data" / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(place / "session.log", place / "data" / name)
    before = files(place)
    for log in ("session.log", f"data/{name}"):
        done = instr("to-parquet", "--csv", log, "-o", "data", "--force")
        assert_refused(
            done, f"data holds something else ({name.partition('/')[0]})", "name another"
        )
        assert changed(before, files(place)) == set()


@pytest.mark.parametrize("link", [False, True])
def test_a_table_that_is_no_regular_file_is_left_alone(
    link: bool, place: Path, instr: Instr
) -> None:
    table = place / "data" / "ops.csv"
    table.unlink()
    if link:
        table.symlink_to("../mine.csv")
    else:
        os.mkfifo(table)
    before = files(place)
    done = instr("to-parquet", "--csv", "session.log", "-o", "data", "--force")
    assert_refused(done, "data holds something else (ops.csv)", "name another")
    assert changed(before, files(place)) == set()


def test_a_log_with_the_name_of_a_table_is_left_alone(place: Path, instr: Instr) -> None:
    shutil.copyfile(place / "session.log", place / "data" / "ops.csv")
    before = files(place)
    done = instr("to-parquet", "--csv", "data/ops.csv", "-o", "data", "--force")
    assert_refused(done, "data/ops.csv would overwrite the input data/ops.csv", "name another")
    assert changed(before, files(place)) == set()


def test_the_directory_of_tables_keeps_its_mode_and_the_link_to_it(
    place: Path, instr: Instr
) -> None:
    (place / "data").chmod(0o700)
    (place / "to data").symlink_to("data")
    before = files(place)
    done = instr("to-parquet", "--csv", "session.log", "-o", "to data", "--force")
    assert done.returncode == 0, said(done)
    assert changed(before, files(place)) == set(TABLES)


@pytest.mark.parametrize(
    "line",
    [
        f"run model.gguf -p {'hello' * 400} {RUN} --log {{}}",
        f"run model.gguf -p hello --chat {RUN} --log {{}}",
        "exec --log {} -- ./missing",
        "exec --log {} -- true",
        f"exec --log {{}} --rotate 1MB -- {sys.executable} -c pass",
    ],
)
def test_a_command_that_records_nothing_leaves_the_log_of_another(
    line: str, place: Path, instr: Instr
) -> None:
    before = files(place)
    command, *words = line.format("old.log").split()
    said(instr(command, "--force", *words))
    assert changed(before, files(place)) == set()


@pytest.mark.parametrize("name", ["text.txt", "program.py", "mine.csv", "demo", "model.gguf"])
@pytest.mark.parametrize(
    "line",
    [
        f"run model.gguf -p hello {RUN} --log",
        f"exec -- {sys.executable} program.py",
        f"exec --rotate 1MB -- {sys.executable} program.py",
    ],
)
def test_only_a_log_is_replaced_by_a_log(line: str, name: str, place: Path, instr: Instr) -> None:
    before = files(place)
    command, *words = line.removesuffix(" --log").split()
    assert_refused(instr(command, "--force", "--log", name, *words), name)
    assert changed(before, files(place)) == set()


def test_a_log_and_its_trace_are_two_files(place: Path, instr: Instr) -> None:
    done = instr("run", "demo", "-p", "x", "--log", "a", "--perfetto", "./a")
    assert_refused(done, "cannot hold both the log and the trace")
    assert not (place / "a").exists()


def test_the_log_that_names_a_model_does(place: Path) -> None:
    (event,) = read_events(place / "named.log", "model")
    assert Path(event["path"]).name == "named.gguf"


@pytest.mark.parametrize("length", [255, 256])
@pytest.mark.parametrize(
    ("option", "case"),
    [(option, case) for option, case in ALL if (option[0], case.output) != ("quantize", "kept")],
    ids=ids,
)
def test_the_longest_name_is_written_and_a_longer_one_refused(
    option: tuple[str, str], case: Case, length: int, place: Path, instr: Instr
) -> None:
    suffix = Path(case.output).suffix if option[0] != "exec" else ""
    name = "n" * (length - len(suffix)) + suffix
    (place / "new.log").unlink()
    before = files(place)
    command, *words = case.line.format(name).split()
    done = instr(command, *words)
    if length == 255:
        assert done.returncode == 0, said(done)
        return
    assert done.returncode in (1, 2)
    (error,) = said(done).splitlines()
    assert error.startswith("Error: ")
    assert "File name too long" in error
    assert changed(before, files(place)) == set()
