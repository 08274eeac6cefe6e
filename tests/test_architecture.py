"""The rooms of docs/explanation/architecture.md, and which of them may import which."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = {"llamacpp_instr": "llamacpp_instr", "converters": "llamacpp_instr.converters"}
"""folder -> its importable name; a link in `llamacpp_instr` leads to the second one"""

# Each room, with those that it may import. All may import `base`.
BELOW: dict[str, set[str]] = {
    "base": set(),
    "model": set(),
    "report": set(),
    "log": {"model"},
    "llama": {"model"},
    "recording": {"llama", "log", "model"},
    "lab": {"llama", "log", "model", "recording", "report"},
    "debugger": {"lab", "llama", "log", "model", "recording", "report"},
    "prediction": {"lab", "llama", "log", "model", "recording"},
    "diverge": {"debugger", "lab", "llama", "log", "model", "report"},
    "converters.exports": {"log", "model", "report"},
    "converters.analyses": {"lab", "log", "model", "prediction", "recording", "report"},
    "converters.validate": {
        "converters.exports", "debugger", "lab", "llama", "log", "model", "report",
    },
    "converters.scheduling": {"converters.exports", "log", "model", "prediction", "report"},
    "converters.fleet": {"converters.analyses", "converters.exports", "log", "report"},
    "converters.live": {"log", "report"},
    "recipe": {
        "converters.analyses", "diverge", "lab", "llama", "log", "model", "prediction", "recording",
        "report",
    },
    "run": {"converters.analyses", "debugger", "lab", "llama", "log", "model", "recording"},
    "converters.notebook": {
        "converters.analyses", "converters.exports", "log", "prediction", "report",
    },
}  # fmt: skip

# Only these folders inside a room are imported by others: by the whole room, or by one folder.
PARTS = {
    "debugger.dap": "debugger.page",
    "lab.weights": "lab.view",
    "log.graph": "log",
    "prediction.probe": "prediction",
}

LOWEST = {"lab.weights", "log.graph", "prediction.probe"}
"""folders inside a room that read nothing of it"""

# the public API and the entry point
TOP: dict[str, set[str]] = {
    "llamacpp_instr": {
        "llamacpp_instr.debugger.stop",
        "llamacpp_instr.log.reader",
        "llamacpp_instr.log.session",
        "llamacpp_instr.recording.session",
        "llamacpp_instr.converters.notebook",
    },
    "llamacpp_instr.__main__": {"llamacpp_instr", "llamacpp_instr.cli"},
    "llamacpp_instr.converters": set(),
}
CLI_SHARED = {"llamacpp_instr.cli", "llamacpp_instr.cli.options", "llamacpp_instr.cli.logs"}

# Libraries that are slow to import or may be missing, and the modules that may import them.
LIBRARIES: dict[str, str | tuple[str, ...]] = {
    "llama_cpp": "llamacpp_instr.llama.",
    "distributed": "llamacpp_instr.converters.fleet.collect",
    "duckdb": "llamacpp_instr.converters.fleet.",
    "fsspec": "llamacpp_instr.converters.fleet.collect",
    "ortools": ("llamacpp_instr.converters.scheduling.optimum", "llamacpp_instr.recipe.choose"),
    "pandas": ("llamacpp_instr.converters.exports.table", "llamacpp_instr.converters.notebook"),
    "perfetto": "llamacpp_instr.converters.exports.perfetto.",
    # for files without a name: its directories outlive a process that is killed
    "tempfile": ("llamacpp_instr.diverge.shares", "llamacpp_instr.lab.weights.export"),
}

MAX_LINES = 600
LONG: dict[str, str] = {
    "llamacpp_instr/log/schema.py": "the one table of every event: splitting it would hide a half",
}


def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found: dict[str, Path] = {}
    for folder, package in PACKAGES.items():
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found.setdefault(".".join((package, *parts)), path)
    return found


MODULES = modules()


def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imported(name: str, within: ast.AST | None = None) -> set[str]:
    """Modules of ours and of LIBRARIES that a module imports, anywhere in it or in a part of it."""
    found: set[str] = set()
    for node in ast.walk(within or tree(name)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if n in MODULES else str(node.module) for n in names]
        found |= {n for n in names if n in MODULES or n.partition(".")[0] in LIBRARIES}
    return found - {name}


@cache
def imports() -> dict[str, set[str]]:
    return {name: imported(name) for name in MODULES}


def room(name: str) -> str:
    """The folder of a module: `log`, `converters.exports`, `cli`; empty for the three of TOP."""
    if name in TOP or name not in MODULES:
        return ""
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "converters" else 1])


def allowed(name: str, other: str) -> bool:
    if name in TOP:
        return other in TOP[name]
    if (library := other.partition(".")[0]) in LIBRARIES:
        return name.startswith(LIBRARIES[library])
    if other in TOP:
        return other == "llamacpp_instr"  # for its version
    if room(name) == "cli":
        # the only place where all rooms meet; its modules share these
        return room(other) != "cli" or other in CLI_SHARED
    if room(other) == "base":
        return True
    if room(name) == "recording" and room(other) == "log":
        return other == "llamacpp_instr.log.schema"
    if room(name) != room(other):
        return room(other) in BELOW[room(name)]
    at = room(name).count(".") + 2
    own, its = name.split(".")[at:], other.split(".")[at:]
    if f"{room(name)}.{own[0]}" in LOWEST and own[0] != its[0]:
        return other == "llamacpp_instr.log.schema"
    above = PARTS.get(f"{room(name)}.{its[0]}", "none")
    return len(its) == 1 or own[0] == its[0] or name.startswith(f"llamacpp_instr.{above}.")


def test_modules_import_only_what_is_below_them() -> None:
    wrong = {
        name: [other for other in sorted(others) if not allowed(name, other)]
        for name, others in imports().items()
    }
    assert {name: others for name, others in wrong.items() if others} == {}


def test_no_imports_go_round() -> None:
    TopologicalSorter(imports()).prepare()
    TopologicalSorter(BELOW).prepare()


def test_every_folder_is_a_room() -> None:
    assert {room(name) for name in MODULES} == {"", "cli", *BELOW}


PAGE = (REPOSITORY / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


def test_the_page_has_the_same_table() -> None:
    rows = re.findall(r"^\| `(?:llamacpp_instr/)?([\w/]+)` \| (.*) \|([^|]*)\|$", PAGE, re.M)
    table = {name.replace("/", "."): (holds, below) for name, holds, below in rows}
    assert {name: set(re.findall(r"`(\w+)`", table[name][1])) for name in BELOW} == {
        name: {other.removeprefix("converters.") for other in below}
        for name, below in BELOW.items()
    }
    for name in (*BELOW, "cli"):
        text = MODULES[f"llamacpp_instr.{name}"].read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or ""
        assert docstring.partition("\n")[0] == f"{table[name][0]}.", name


def test_the_drawing_has_each_room_above_what_it_imports() -> None:
    lines = PAGE.partition("## Rooms")[2].split("```")[1].splitlines()[1:]
    floor = {name: -number for number, line in enumerate(lines) for name in line.split()}
    assert floor.keys() == {"cli", *(name.removeprefix("converters.") for name in BELOW)}
    for name, below in BELOW.items():
        for other in below:
            assert floor[name.split(".")[-1]] > floor[other.split(".")[-1]], (name, other)


READING = {"log", "report", *(name for name in BELOW if name.startswith("converters"))} - {
    "converters.validate"
}


def test_reading_needs_no_native_library() -> None:
    """Neither directly nor through imported modules."""
    reached: set[str] = set()
    todo = [name for name in MODULES if room(name) in READING]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo.extend(imports().get(name, ()))
    assert not [name for name in reached if room(name) == "llama" or name.startswith("llama_cpp")]


def test_only_commands_that_write_tables_or_traces_load_their_libraries() -> None:
    def importers(folder: str) -> set[str]:
        """For commands, which share modules, their functions."""
        found = {
            name
            for name, others in imports().items()
            if not name.startswith(folder) and any(other.startswith(folder) for other in others)
        }
        for name in [name for name in found if room(name) == "cli"]:
            functions = [of for of in ast.walk(tree(name)) if isinstance(of, ast.FunctionDef)]
            within = {of.name: imported(name, of) for of in functions}
            found.remove(name)
            found |= {of for of in within if any(other.startswith(folder) for other in within[of])}
        return found

    assert importers("llamacpp_instr.converters.exports.table") == {
        "to_parquet",
        "llamacpp_instr.converters.notebook",
    }
    assert importers("llamacpp_instr.converters.exports.perfetto") == {
        "to_perfetto", "write_trace", "llamacpp_instr.converters.scheduling.trace",
    }  # fmt: skip


def test_the_rule_sees_what_it_has_to_see() -> None:
    assert "llamacpp_instr.llama.build.wheel" in imports()["llamacpp_instr.cli.build"], (
        "in a function"
    )
    assert room("llamacpp_instr.base.errors") == "base"
    assert room("llamacpp_instr.log.graph.ops") == "log"
    assert not allowed(
        "llamacpp_instr.converters.exports.chrome",
        "llamacpp_instr.converters.exports.perfetto.kernels",
    )
    assert not allowed("llamacpp_instr.converters.exports.chrome", "llamacpp_instr.llama.native")
    assert not allowed("llamacpp_instr.log.graph.ops", "llamacpp_instr.log.reader")
    assert not allowed("llamacpp_instr.log.session", "llama_cpp")
    assert not allowed("llamacpp_instr.recording.session", "llamacpp_instr.log.reader")
    assert not allowed("llamacpp_instr.run.exec", "llamacpp_instr.cli")
    assert not allowed(
        "llamacpp_instr.report.perfetto_ui", "llamacpp_instr.converters.exports.perfetto"
    )
    assert allowed(
        "llamacpp_instr.converters.exports.perfetto.stream",
        "llamacpp_instr.converters.exports.perfetto.kernels",
    )
    assert allowed("llamacpp_instr.converters.analyses.stats", "llamacpp_instr.model.file")
    assert allowed("llamacpp_instr.cli.look", "llamacpp_instr.log.session")


def test_one_room_knows_operating_systems() -> None:
    """What Linux reports and what macOS reports stand side by side."""
    asking = {
        name
        for name, path in MODULES.items()
        if re.search(r"/proc/|/sys/|\bsys\.platform\b|\bprctl\b|\bRLIMIT_", path.read_text())
    }
    assert asking == {
        "llamacpp_instr.base.cpus",
        "llamacpp_instr.base.machine",
        "llamacpp_instr.base.processes",
    }


def test_files_fit_in_a_readers_head() -> None:
    long = {}
    for directory in (*PACKAGES, "tests", "tools", "benchmarks", "patches/src"):
        for path in sorted((REPOSITORY / directory).rglob("*")):
            if path.suffix not in {".py", ".c", ".cpp", ".h"} or "node_modules" in path.parts:
                continue
            name = path.relative_to(REPOSITORY).as_posix()
            lines = path.read_text(encoding="utf-8").count("\n")
            if lines > MAX_LINES and name not in LONG:
                long[name] = lines
    assert long == {}, f"files of more than {MAX_LINES} lines; split them by idea"
