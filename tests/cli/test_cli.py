"""The whole command line: help, lazy imports, and every error as one line and an exit status."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
import zstandard
from click.testing import CliRunner, Result

from llamacpp_instr import __version__, cli
from llamacpp_instr.base.errors import BuildError, LogError

SAMPLE = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


def instr(*args: str) -> Result:
    return CliRunner().invoke(cli.main, args)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_is_complete(name: str) -> None:
    """The first line says what it reads; an example and a text for each option follow."""
    result = instr(name, "--help")
    assert result.exit_code == 0, result.output
    assert f"Usage: instr {name}" in result.output
    assert "Example" in result.output
    assert f"\n  instr {name}" in result.output or f"\n    instr {name}" in result.output
    first = result.output.splitlines()[2].strip()
    assert cli.COMMANDS[name] == first
    assert re.search(r"\b(log|model)s?\b", first) or name in ("build", "doctor", "probe")
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command is not None
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert [option.opts[0] for option in options if not option.help] == []


def test_an_earlier_name_of_a_command_works_and_is_not_listed() -> None:
    assert instr("report", "--help").output == instr("memory", "--help").output
    assert not re.search(r"^  report\b", instr("--help").output, re.M)
    assert "see instr memory --help" in instr("report", "--foo").stderr


def test_no_help_text_or_page_has_control_characters() -> None:
    texts = {name: instr(name, "--help").output for name in cli.COMMANDS}
    texts["instr"] = instr("--help").output
    pages = [
        page
        for pattern in ("*.md", "*/*.md", "docs/*/*.md")
        for page in SAMPLE.parents[2].glob(pattern)
    ]
    texts |= {str(page): page.read_text(encoding="utf-8") for page in pages}
    assert any(page.name == "commands.md" for page in pages)
    assert [
        name for name, text in texts.items() if re.search(r"[^\n\x20-\x7e\xa0-\U0010ffff]", text)
    ] == []


def test_the_help_lists_every_command_and_what_to_begin_with() -> None:
    result = instr("--help")
    assert result.exit_code == 0
    groups = re.findall(r"^([A-Z]\w+):\n((?:  \S.*\n)+)", result.output, re.M)
    shown = {purpose: [line.split()[0] for line in lines.splitlines()] for purpose, lines in groups}
    assert list(shown) == ["Options", *cli.GROUPS]
    for purpose, commands in cli.GROUPS.items():
        assert shown[purpose] == list(commands)
        assert all(text in result.output for text in commands.values())
    assert "instr run demo" in result.output


def test_no_command_is_the_help_and_wrong_input() -> None:
    assert instr().output == instr("--help").output
    assert instr().exit_code == 2


@pytest.mark.native
def test_the_version() -> None:
    assert instr("--version").output == f"instr {__version__}\n"
    run = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "--version"], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, f"instr {__version__}\n")


def test_help_imports_no_command_and_nothing_heavy() -> None:
    run = python(
        "import sys\n"
        "from llamacpp_instr.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('MODULES', *sys.modules)"
    )
    modules = set(run.stdout.partition("MODULES ")[2].split())
    heavy = {
        "numpy", "pandas", "perfetto", "google", "llama_cpp", "msgspec", "orjson", "rich", "gguf",
    }  # fmt: skip
    assert "click" in modules
    assert modules & heavy == set()
    ours = {name for name in modules if name.startswith("llamacpp_instr")}
    parts = ("", ".base", ".base.errors", ".base.terminal", ".cli")
    assert ours == {f"llamacpp_instr{name}" for name in parts}


def test_help_is_little_work() -> None:
    """About 30,000 calls, which take a tenth of a second; numpy alone would add more."""
    code = (
        "import sys\n"
        "calls = []\n"
        "sys.setprofile(lambda _frame, event, _: event == 'call' and calls.append(1))\n"
        "from llamacpp_instr.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('CALLS', len(calls))"
    )
    assert 1000 < int(python(code).stdout.rpartition("CALLS ")[2]) < 60_000


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["buidl"], r"no command 'buidl' \(did you mean 'build'\?\); see instr --help"),
        (["zzz"], r"no command 'zzz' \(choose from build, .*\); see instr --help"),
        # click's own words differ between its versions
        (["--foo"], r"No such option:? '?--foo'?; see instr --help"),
        (["build", "--foo"], r"No such option:? '?--foo'?; see instr build --help"),
        (["build", "--jobs", "0"], r"Invalid value for '--jobs' / '-j': 0 .*; see instr build .*"),
        (["build", "--cmake-args", "'"], r"Invalid value for --cmake-args: No closing .*"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(args: list[str], line: str) -> None:
    result = instr(*args)
    assert result.exit_code == 2
    assert re.fullmatch(f"Error: {line}\n", result.stderr), result.stderr
    assert result.stdout == ""


def give(monkeypatch: pytest.MonkeyPatch, end: BaseException) -> None:
    """Add a command `attempt` that ends with an exception."""

    @click.command()
    def attempt() -> None:
        raise end

    name = "llamacpp_instr.cli.attempt"
    module = types.ModuleType(name)
    module.attempt = attempt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(cli.COMMANDS, "attempt", "Try.")


@pytest.mark.parametrize(
    ("end", "status", "line"),
    [
        (BuildError("no tea; boil water"), 1, "Error: no tea; boil water\n"),
        (LogError("not a log", "a.log", 3), 2, "Error: a.log:3: not a log\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted\n"),
        (OSError(36, "File name too long", "a.log"), 2, "Error: a.log: File name too long\n"),
        (click.ClickException("no"), 1, "Error: no\n"),
        (click.exceptions.Exit(0), 0, ""),
        (click.exceptions.Exit(1), 1, ""),
        (click.exceptions.Exit(77), 77, ""),
    ],
)
def test_a_command_has_its_exit_code_and_an_error_one_line(
    end: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, end)
    result = instr("attempt")
    assert (result.exit_code, result.stderr) == (status, line)


@pytest.mark.native
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["summary", "session.log"], ""),
        (["cat", "session.log"], ""),
        (["stats", "session.log", "-o", "stats.txt"], ""),
        (["check", "-"], "Error: standard input: empty: nothing was recorded\n"),
        (["summary", "none.log"], "Error: none.log: no such file\n"),
    ],
)
def test_closed_standard_streams_are_empty_ones(
    args: list[str], expected: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Some services, and `>&-`, start programs like this; no file may get a stream's number."""
    shutil.copyfile(SAMPLE, tmp_path / "session.log")
    for closed in ("<&- >&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'"$0" "$@" {closed}', sys.executable, "-m", "llamacpp_instr", *args],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if expected else 0)
        assert (done.stdout, done.stderr) == ("", "" if "2>" in closed else expected)
        if "-o" in args:
            assert (tmp_path / "stats.txt").read_text().startswith("Kernels by op")
            (tmp_path / "stats.txt").unlink()


@pytest.mark.parametrize("command", ["check", "cat", "summary", "stats", "memory", "inspect"])
def test_an_empty_path_is_named(command: str) -> None:
    """An unset shell variable gives an empty path."""
    result = instr(command, "")
    assert result.exit_code == 2
    assert str(result.stderr).endswith("is named: the path is empty\n")


NO_NAME = "x" * 300
"""longer than a file system allows"""


@pytest.mark.parametrize(
    "command",
    [
        "check NO_NAME", "cat NO_NAME", "summary NO_NAME NO_NAME", "stats LOG -o NO_NAME",
        "diff LOG NO_NAME", "diff --before LOG --after NO_NAME", "exec -- NO_NAME",
        "exec --log NO_NAME -- true", "inspect NO_NAME", "blocks NO_NAME tensor", "live NO_NAME",
        "collect NO_NAME -o fleet", "collect LOG -o NO_NAME", "sql NO_NAME summary", "view NO_NAME",
        "to-parquet LOG -o NO_NAME", "to-torch LOG -o NO_NAME", "to-onnx NO_NAME -o graph.onnx",
        "to-otlp LOG -o NO_NAME",
        "import NO_NAME -o model.gguf", "validate demo --reference NO_NAME", "page LOG -o NO_NAME",
        "quantize demo --types Q8_0 --imatrix NO_NAME", "quality demo demo --text NO_NAME",
        "predict demo --machine NO_NAME", "schedule NO_NAME", "run NO_NAME -p hi", "ops NO_NAME",
        "run demo -p hi --log NO_NAME", "debug demo -p hi --log NO_NAME",
    ],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"NO_NAME": NO_NAME, "LOG": str(SAMPLE)}
    result = instr(*(named.get(word, word) for word in command.split()))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.native
def test_ctrl_c_is_one_line_from_the_first_import(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "click.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "--help"],
        env={**environment, "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted\n")


def test_ctrl_c_is_one_line_where_an_error_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code turns it into an error of its own: Python's (`__set_name__`, up to 3.11), and
    matplotlib's where it converts matrices."""

    @click.command()
    def attempt() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ValueError("Invalid affine transformation matrix")

    give(monkeypatch, ValueError())
    monkeypatch.setattr(sys.modules["llamacpp_instr.cli.attempt"], "attempt", attempt)
    result = instr("attempt")
    assert (result.exit_code, result.stderr.strip()) == (130, "Interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_bug_is_one_line_that_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, ZeroDivisionError("a bug\nof ours"))
    assert isinstance(instr("attempt").exception, ZeroDivisionError), "the tests see it"
    monkeypatch.delenv(cli.SHOW_TRACEBACK)
    result = instr("attempt")
    assert result.exit_code == 1
    assert re.fullmatch(
        r"Error: a bug in instr: ZeroDivisionError: a bug of ours \(test_cli\.py:\d+\); please "
        r"report it with the traceback that LLAMACPP_INSTR_TRACEBACK=1 shows\n",
        result.stderr,
    )


@pytest.mark.native
def test_a_reader_that_has_enough_is_no_error() -> None:
    code = (
        "import sys, types, click\n"
        "from llamacpp_instr import cli\n"
        "@click.command()\n"
        "def lines():\n"
        "    for i in range(100000): click.echo(i)\n"
        "sys.modules['llamacpp_instr.cli.lines'] = types.SimpleNamespace(lines=lines)\n"
        "cli.COMMANDS['lines'] = ''\n"
        "cli.main(['lines'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        "cat LOG", "cat LOG --expand", "check LOG", "compare LOG LOG", "diff LOG LOG",
        "memory LOG", "stats LOG", "summary LOG", "to-parquet LOG -o OUT",
        "to-parquet LOG --csv -o OUT", "to-perfetto LOG -o OUT", "to-perfetto LOG --lenient -o OUT",
        "to-perfetto LOG --format json -o OUT", "view LOG --no-browser",
    ],
)  # fmt: skip
def test_a_zstd_log_without_zstandard_names_what_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "session.log.zst"
    log.write_bytes(zstandard.compress(SAMPLE.read_bytes()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    names = {"LOG": str(log), "OUT": str(tmp_path / "out")}
    result = instr(*(names.get(word, word) for word in command.split()))
    assert (result.exit_code, result.stdout) == (2, "")
    message = f"{log}: compressed with zstd, which needs zstandard: pip install zstandard"
    assert result.stderr == f"Error: {message}\n"
    assert [path.name for path in tmp_path.iterdir()] == [log.name]
