"""Who may import whom, over every import statement; and rooms that stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
OURS = ("llamacpp_instr", "converters")

# The floor knows nobody; then log -> session -> converters on one side ...
FLOOR = {"llamacpp_instr"} | {
    f"llamacpp_instr.{name}"
    for name in ("errors", "patterns", "schema", "terminal", "output", "temporary", "progress")
}
BELOW_READING: dict[str, set[str]] = {
    "llamacpp_instr.errors": set(),
    "llamacpp_instr.schema": set(),
    "llamacpp_instr.terminal": set(),
    "llamacpp_instr.progress": {"llamacpp_instr.terminal"},
    "llamacpp_instr.output": {"llamacpp_instr.errors"},
    "llamacpp_instr.temporary": {"llamacpp_instr.errors"},
    "llamacpp_instr.patterns": {"llamacpp_instr.errors"},
    "llamacpp_instr.ops": FLOOR,
    "llamacpp_instr.dialects": FLOOR,
    "llamacpp_instr.kernels": FLOOR | {"llamacpp_instr.ops"},
    "llamacpp_instr.log_file": FLOOR,
    "llamacpp_instr.log": FLOOR | {"llamacpp_instr.dialects", "llamacpp_instr.log_file"},
    "llamacpp_instr.check.event": FLOOR,
    "llamacpp_instr.check.facts": FLOOR,
    "llamacpp_instr.check.measures": FLOOR | {"llamacpp_instr.check.facts"},
    "llamacpp_instr.check": FLOOR
    | {"llamacpp_instr.log"}
    | {f"llamacpp_instr.check.{part}" for part in ("event", "facts", "measures")},
    "llamacpp_instr.columns": FLOOR,
    "llamacpp_instr.session": FLOOR
    | {"llamacpp_instr.columns", "llamacpp_instr.kernels", "llamacpp_instr.log"},
    "llamacpp_instr.counted": FLOOR | {"llamacpp_instr.session"},
}
READING = set(BELOW_READING) - FLOOR
# ... model files, as their headers tell, and what is computed of weights and logits once they are
# numbers: no library is needed for these, so both sides may use them ...
BELOW_MODELS: dict[str, set[str]] = {
    "llamacpp_instr.ggml_types": set(),
    "llamacpp_instr.gguf_header": FLOOR,
    "llamacpp_instr.models": FLOOR | {f"llamacpp_instr.{m}" for m in ("ggml_types", "gguf_header")},
    "llamacpp_instr.model_file": FLOOR
    | {f"llamacpp_instr.{module}" for module in ("ggml_types", "gguf_header", "models")},
    "llamacpp_instr.fallback": {"llamacpp_instr.ggml_types", "llamacpp_instr.model_file"},
    "llamacpp_instr.weight_error": {"llamacpp_instr.ggml_types"},
    "llamacpp_instr.block_layout": {"llamacpp_instr.ggml_types"},
    "llamacpp_instr.blocks": FLOOR
    | {f"llamacpp_instr.{module}" for module in ("block_layout", "ggml_types", "model_file")},
    "llamacpp_instr.block_stats": FLOOR
    | {f"llamacpp_instr.{module}" for module in ("block_layout", "blocks", "model_file")},
    "llamacpp_instr.imatrix": FLOOR | {"llamacpp_instr.gguf_header"},
    "llamacpp_instr.quantization": FLOOR
    | {f"llamacpp_instr.{module}" for module in ("ggml_types", "model_file")},
    "llamacpp_instr.quantize_checks": FLOOR
    | {f"llamacpp_instr.{module}" for module in ("imatrix", "model_file", "quantization")},
    "llamacpp_instr.quantize_log": FLOOR
    | {f"llamacpp_instr.{module}" for module in ("ggml_types", "model_file", "quantization")},
    "llamacpp_instr.memory": FLOOR | {"llamacpp_instr.model_file"},
    "llamacpp_instr.divergence": FLOOR,
}
MODELS = set(BELOW_MODELS)
# ... and everything that needs the native library on the other; only the cli sees both.

# What several converters are made of is no sibling; and one converter may be a package of rooms.
SHARED = {"converters.report": FLOOR, "converters.op_words": FLOOR, "converters.noise": FLOOR}
SHARED["converters.page"] = {"converters.report", "llamacpp_instr.terminal"}
SHARED["converters.charts"] = FLOOR | {"converters.report"}
SHARED["converters.timeline"] = FLOOR | READING | {"converters.op_words"}
SHARED["converters.settings"] = FLOOR | READING | {"converters.report"}
SHARED["converters.stored"] = FLOOR | READING | MODELS
SHARED["converters.layer_chart"] = {"converters.charts", "converters.report", "converters.stored"}
SHARED["converters.error_charts"] = MODELS | {"converters.charts", "converters.report"}
SHARED["converters.step_times"] = FLOOR | READING | {"converters.noise"}

CLI_SHARED = {"llamacpp_instr.cli.context_options", "llamacpp_instr.cli.ranges"}

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
    """Modules of ours that a module imports, anywhere in it."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        found |= {n for n in names if n in MODULES or n.partition(".")[0] == "llama_cpp"}
    return found - {name}


def allowed(name: str, other: str) -> bool:
    """Whether a module may import another one."""
    if name == "llamacpp_instr.__main__":
        return other in {"llamacpp_instr", "llamacpp_instr.cli"}
    if name.startswith("llamacpp_instr.cli"):
        # the only place where both sides meet; its modules share the frame and these two
        return not other.startswith("llamacpp_instr.cli.") or other in CLI_SHARED
    if name in BELOW_READING:
        return other in BELOW_READING[name]
    if name in BELOW_MODELS:
        return other in BELOW_MODELS[name]
    if name == "converters":
        return other.startswith("converters.") or other in FLOOR | READING | MODELS
    if name in SHARED:
        return other in SHARED[name]
    if name.startswith("converters."):
        # what all converters are made of is no sibling, and the parts of one are one room
        own = ".".join(name.split(".")[:2])
        return other in FLOOR | READING | MODELS | set(SHARED) or f"{other}.".startswith(f"{own}.")
    if name == "llamacpp_instr.view":
        # serves files: it knows neither side
        return other == "llamacpp_instr.errors"
    if name == "llamacpp_instr":
        # `llamacpp_instr.recording` is the package's Python interface
        return other in {"llamacpp_instr.errors", "llamacpp_instr.recording"}
    # recording: no reading side, no command line
    return not other.startswith(("converters", "llamacpp_instr.cli")) and other not in READING


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_stands_below_it(name: str) -> None:
    wrong = sorted(other for other in imported(name) if not allowed(name, other))
    assert wrong == [], f"{name} must not import {', '.join(wrong)}"


def test_the_rule_sees_what_it_has_to_see() -> None:
    assert "llamacpp_instr.errors" in imported("llamacpp_instr.build")
    assert "llamacpp_instr.build" in imported("llamacpp_instr.cli.build"), "inside of a function"
    assert not allowed("converters.chrome", "converters.perfetto")
    assert not allowed("converters.chrome", "converters.diff.align")
    assert not allowed("converters.chrome", "converters.perfetto.wire")
    assert not allowed("converters.perfetto.wire", "converters.perf")
    assert not allowed("converters.timeline", "converters.perfetto")
    assert allowed("converters.perfetto.stream", "converters.perfetto.wire")
    assert allowed("converters.perfetto", "converters.timeline")
    assert not allowed("converters.chrome", "llamacpp_instr.native")
    assert not allowed("converters.chrome", "llama_cpp")
    assert not allowed("llamacpp_instr.log", "llamacpp_instr.session")
    assert not allowed("llamacpp_instr.session", "llama_cpp")
    assert not allowed("llamacpp_instr.recording", "llamacpp_instr.log")
    assert not allowed("llamacpp_instr.run", "llamacpp_instr.cli")
    assert not allowed("llamacpp_instr.view", "llamacpp_instr.native")
    assert not allowed("llamacpp_instr.view", "converters.perfetto")
    assert not allowed("llamacpp_instr.model_file", "llamacpp_instr.native")
    assert allowed("converters.stats", "llamacpp_instr.model_file")
    assert allowed("llamacpp_instr.recording", "llamacpp_instr.native")
    assert allowed("llamacpp_instr.cli.summary", "llamacpp_instr.session")


def test_files_fit_in_a_readers_head() -> None:
    long = {}
    for directory in (*OURS, "tests", "tools", "benchmarks", "patches/src"):
        for path in sorted((REPOSITORY / directory).rglob("*")):
            if path.suffix not in {".py", ".c", ".cpp", ".h"}:
                continue
            name = path.relative_to(REPOSITORY).as_posix()
            lines = path.read_text(encoding="utf-8").count("\n")
            if lines > MAX_LINES and name not in LONG:
                long[name] = lines
    assert long == {}, f"files of more than {MAX_LINES} lines; split them by idea"


def test_the_exceptions_are_still_needed() -> None:
    for name in LONG:
        lines = (REPOSITORY / name).read_text(encoding="utf-8").count("\n")
        assert lines > MAX_LINES, f"{name} has become short: it needs no exception"
