"""The folders of docs/architecture.md, and which of them may import which."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OURS = ("llamacpp_instr", "converters")

# Each folder, with those that it may import. All folders may import the modules beside the folders
# of llamacpp_instr (the floor).
BELOW: dict[str, set[str]] = {
    "graph": {"model"},
    "model": set(),
    "log": {"graph"},
    "llama": {"model"},
    "recording": {"llama"},
    "build": {"llama"},
    "memory": {"llama", "model", "recording"},
    "probe": {"build", "llama", "model"},
    "quantize": {"llama", "model"},
    "importer": {"build", "model"},
    "prediction": {"graph", "llama", "log", "memory", "model", "probe", "quantize", "recording"},
    "quality": {"llama", "memory", "model"},
    "weights": {"llama", "model"},
    "debugger": {"graph", "llama", "model", "recording", "weights"},
    "debug_page": {"converters.serving", "converters.weights_view", "debugger"},
    "validate": {
        "converters.exports", "converters.report", "build", "debugger", "graph", "importer",
        "llama", "model", "weights",
    },
    "diverge": {
        "converters.report", "debugger", "graph", "llama", "model", "quality",
    },
    "capturing": {
        "converters.exports", "converters.flashinfer", "debugger", "graph", "llama", "log", "model",
        "validate", "weights",
    },
    "run": {"debugger", "llama", "memory", "model", "quantize", "recording"},
    "converters.report": set(),
    "converters.exports": {"graph", "log", "model"},
    "converters.flashinfer": {"converters.report", "graph", "log"},
    "converters.scheduling": {"converters.exports", "converters.report", "graph", "log", "probe"},
    "converters.serving": set(),
    "converters.perfetto_ui": {"converters.serving"},
    "converters.live": {"converters.report", "converters.serving", "graph", "log"},
    "converters.weights_view": {"converters.serving", "model", "weights"},
    "converters.analyses": {
        "converters.report", "graph", "log", "memory", "model", "prediction", "probe", "quality",
        "quantize", "weights",
    },
    "converters.fleet": {
        "converters.analyses", "converters.exports", "converters.report", "graph", "log",
    },
    "converters.notebook": {
        "converters.analyses", "converters.exports", "converters.report", "log", "probe",
    },
}  # fmt: skip

# the public API and the entry point
TOP: dict[str, set[str]] = {
    "llamacpp_instr": {
        "llamacpp_instr.debugger.api",
        "llamacpp_instr.log.reader",
        "llamacpp_instr.log.session",
        "llamacpp_instr.recording.session",
        "converters.notebook",
    },
    "llamacpp_instr.__main__": {"llamacpp_instr", "llamacpp_instr.cli"},
    "converters": set(),
}
CLI_SHARED = {
    f"llamacpp_instr.cli.{name}"
    for name in (
        "options",
        "debug_runs",
        "recording",
        "live_range",
        "logs",
        "serving",
        "size_bound",
    )
}

# Libraries that are slow to import or may be missing, and the modules that may import them.
LIBRARIES: dict[str, str | tuple[str, ...]] = {
    "llama_cpp": "llamacpp_instr.llama.",
    "distributed": "converters.fleet.on_dask",
    "duckdb": "converters.fleet.",
    "fsspec": "converters.fleet.sources",
    "ortools": ("converters.scheduling.constraints", "converters.scheduling.optimum"),
    "pandas": ("converters.exports.table", "converters.notebook"),
    "perfetto": "converters.exports.perfetto.",
    # for files without a name: its directories outlive a process that is killed
    "tempfile": ("llamacpp_instr.diverge.exchange", "llamacpp_instr.weights.export"),
}

MAX_LINES = 400
LONG: dict[str, str] = {
    "llamacpp_instr/schema.py": "the one table of every event: splitting it would hide a half",
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of both packages."""
    found: dict[str, Path] = {}
    for package in OURS:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str) -> set[str]:
    """Modules of ours and of LIBRARIES that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
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
    """The folder of a module: `log`, `converters.exports`, `cli`; empty for the floor."""
    parts = name.split(".")
    if parts[0] == "converters":
        return ".".join(parts[:2])
    folder = ".".join(parts[:2])
    is_folder = folder in MODULES and MODULES[folder].name == "__init__.py" and len(parts) > 1
    return parts[1] if is_folder else ""


def allowed(name: str, other: str) -> bool:
    if name in TOP:
        return other in TOP[name]
    if (library := other.partition(".")[0]) in LIBRARIES:
        return name.startswith(LIBRARIES[library])
    if room(name) == "cli":
        # the only place where both sides meet; its modules share the frame and these two
        return room(other) != "cli" or other in CLI_SHARED
    if room(other) == "":
        return other not in TOP or other == "llamacpp_instr"  # for its version
    if room(name) == room(other):
        # an analysis or export may not import parts of another one
        own, its = name.split(".")[:3], other.split(".")[:3]
        return own == its or len(other.split(".")) == 3
    return room(other) in BELOW.get(room(name), set())


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
    assert {room(name) for name in MODULES} == {"", "cli", "converters", *BELOW}


def test_the_page_has_the_same_table() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(?:llamacpp_instr/)?([\w/]+)` \|.*\|([^|]*)\|$", page, re.M)
    table = {name.replace("/", "."): set(re.findall(r"`(\w+)`", below)) for name, below in rows}
    assert {name: below for name, below in table.items() if name in BELOW} == {
        name: {other.removeprefix("converters.") for other in below}
        for name, below in BELOW.items()
    }


def test_reading_needs_no_native_library() -> None:
    """Neither directly nor through imported modules."""
    reached: set[str] = set()
    todo = [name for name in MODULES if name.startswith("converters") or room(name) == "log"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo.extend(imports().get(name, ()))
    assert not [name for name in reached if room(name) == "llama" or name.startswith("llama_cpp")]


def test_only_commands_that_write_tables_or_traces_load_their_libraries() -> None:
    def importers(folder: str) -> set[str]:
        return {
            name.removeprefix("llamacpp_instr.cli.")
            for name, others in imports().items()
            if not name.startswith(folder) and any(other.startswith(folder) for other in others)
        }

    assert importers("converters.exports.table") == {"to_parquet", "converters.notebook"}
    assert importers("converters.exports.perfetto") == {
        "run", "to_perfetto", "view", "converters.scheduling.trace",
    }  # fmt: skip


def test_the_rule_sees_what_it_has_to_see() -> None:
    assert "llamacpp_instr.build.wheel" in imports()["llamacpp_instr.cli.build"], "in a function"
    assert room("llamacpp_instr.errors") == room("llamacpp_instr") == ""
    assert room("llamacpp_instr.log.check.event") == "log"
    assert not allowed("converters.exports.chrome", "converters.exports.perfetto.template")
    assert not allowed("converters.exports.chrome", "llamacpp_instr.llama.native")
    assert not allowed("llamacpp_instr.graph.ops", "llamacpp_instr.log.reader")
    assert not allowed("llamacpp_instr.log.session", "llama_cpp")
    assert not allowed("llamacpp_instr.recording.session", "llamacpp_instr.log.reader")
    assert not allowed("llamacpp_instr.run.exec", "llamacpp_instr.cli")
    assert not allowed("converters.perfetto_ui", "converters.exports.perfetto")
    assert allowed("converters.exports.perfetto.stream", "converters.exports.perfetto.template")
    assert allowed("converters.analyses.stats", "llamacpp_instr.model.file")
    assert allowed("llamacpp_instr.cli.summary", "llamacpp_instr.log.session")


def test_files_fit_in_a_readers_head() -> None:
    long = {}
    for directory in (*OURS, "tests", "tools", "benchmarks", "patches/src"):
        for path in sorted((REPOSITORY / directory).rglob("*")):
            if path.suffix not in {".py", ".c", ".cpp", ".h"} or "node_modules" in path.parts:
                continue
            name = path.relative_to(REPOSITORY).as_posix()
            lines = path.read_text(encoding="utf-8").count("\n")
            if lines > MAX_LINES and name not in LONG:
                long[name] = lines
    assert long == {}, f"files of more than {MAX_LINES} lines; split them by idea"
