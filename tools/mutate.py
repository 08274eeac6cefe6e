"""Measures how many small mistakes the tests notice: `make mutate`.

    python -m tools.mutate [PATH...] --count 60 --seed 1 [--near] [--at-least 80] [-o FILE]

Copies the tracked files, draws `--count` mutants of the modules below the paths, and runs the tests
on each: first the folder of tests that has the name of the module's folder, then the rest. `--near`
runs only the former, in seconds. `--native` includes the native tests, which take minutes for each
mutant that the pure ones miss. cosmic-ray makes the mutants: another operator, comparison or
number, a loop that never runs, a condition negated. A place is drawn first, then one of its
mutants. The modules take turns, so large ones do not crowd out small ones.

Prints each survivor as a diff, since some change nothing that anyone could see, and a table by
module. Exits with status 1 if a smaller share than `--at-least` (in percent) was killed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parent.parent
# rooms whose figures users trust
TRUSTED = (
    "converters/analyses", "converters/exports", "converters/fleet", "converters/live",
    "converters/scheduling", "llamacpp_instr/log",
    "llamacpp_instr/recording/memory", "llamacpp_instr/model", "llamacpp_instr/prediction",
    "llamacpp_instr/lab/quality", "llamacpp_instr/lab/weights",
)  # fmt: skip
# operators of cosmic-ray that end in a TypeError, which says little about a test
CRUDE = re.compile(
    r"RemoveDecorator|ExceptionReplacer|_(Bit\w+|[LR]Shift|Pow|Mod|Invert|UAdd|Is|IsNot|In|NotIn)$"
)
# limits for all tests that are not native, even on a busy machine, and for one test, which fails
SECONDS, ONE_TEST = 900, 300

Place = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One change of one module, and its outcome."""

    module: str
    line: int
    diff: str
    source: str
    outcome: str = ""


def places(source: str) -> dict[Place, list[tuple[str, int]]]:
    """Line and column of every place that can be changed -> operators of cosmic-ray, with the
    occurrence. Annotations, docstrings, decorators and imports are left out: no mutant of them
    changes a result."""
    spared = _spared(source)
    found: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    tree = get_ast(source)
    nodes = list(ast_nodes(tree))
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        if kind.arguments() or CRUDE.search(name):
            continue
        operator = kind()
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(first <= start < last for first, last in spared):
                found[start].append((name, occurrence))
    return found


def _spared(source: str) -> list[tuple[Place, Place]]:
    spared: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        # annotations, results and decorators
        spared += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        spared += getattr(node, "decorator_list", [])
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            spared.append(node)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            spared.append(node.value)  # of zip: it asserts, and changes no result
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in spared
        if isinstance(node, ast.expr | ast.stmt)
    ]


def draw(modules: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
    """At most `count` mutants that Python can compile, from the modules in turn."""
    return itertools.islice(_mutants(modules, seed), count)


def _mutants(modules: Sequence[str], seed: int) -> Iterator[Mutant]:
    chance = random.Random(seed)
    waiting = {}
    for module in modules:
        source = (ROOT / module).read_text(encoding="utf-8")
        found = sorted(places(source).items())
        chance.shuffle(found)
        waiting[module] = (source, found)
    order = sorted(module for module, (_, found) in waiting.items() if found)
    chance.shuffle(order)
    while order:
        for module in list(order):
            source, found = waiting[module]
            if not found:
                order.remove(module)
                continue
            (line, _), operators = found.pop()
            name, occurrence = chance.choice(operators)
            changed = mutate_code(source, plugins.get_operator(name)(), occurrence)
            if changed is None or not _compiles(changed):
                continue
            lines = difflib.unified_diff(
                source.splitlines(), changed.splitlines(), module, module, lineterm="", n=0
            )
            yield Mutant(module, line, "\n".join(list(lines)[2:]), changed)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def copy_of_the_tree(into: Path) -> Path:
    """A copy of the tracked files, as they are in the working tree."""
    for name in tracked_files():
        if (ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)
    node_modules = ROOT / "tests" / "ui" / "node_modules"
    if node_modules.is_dir():
        (into / "tests" / "ui" / "node_modules").symlink_to(node_modules)
    return into


def rounds_of_tests(module: str, near: bool, native: bool) -> list[list[str]]:
    """Arguments of pytest for each run: the tests of the module's folder, then all others."""
    parts = reversed(Path(module).with_suffix("").parts)
    folder = next((f"tests/{part}" for part in parts if (ROOT / "tests" / part).is_dir()), None)
    rounds = [["tests"]] if folder is None else [[folder], ["tests", f"--ignore={folder}"]]
    kinds = ("not native", "native") if native else ("not native",)
    return [["-m", kind, *of] for kind in kinds for of in (rounds[:1] if near else rounds)]


def outcome_of(mutant: Mutant, tree: Path, near: bool, native: bool) -> str:
    """`killed`, `lived`, or `slow` for one that kept the tests from ending in time."""
    path = tree / mutant.module
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        rounds = rounds_of_tests(mutant.module, near, native)
        statuses = (_run_tests(tree, arguments) for arguments in rounds)
        return next((status for status in statuses if status != "lived"), "lived")
    finally:
        path.write_text(before, encoding="utf-8")


def _run_tests(tree: Path, arguments: list[str]) -> str:
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
        "-o", f"faulthandler_timeout={ONE_TEST}", *arguments,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "slow"
    # 5: the folder has no test of this kind
    return "lived" if done.returncode in (0, 5) else "killed"


def table(results: Sequence[Mutant]) -> str:
    """Killed and drawn mutants of each module, the weakest first, and of all; beside them those
    that kept the tests from ending, which are not counted as killed."""
    drawn = Counter(each.module for each in results)
    killed, slow = (
        Counter(each.module for each in results if each.outcome == outcome)
        for outcome in ("killed", "slow")
    )
    rows = [(module, killed[module], drawn[module], slow[module]) for module in drawn]
    rows.sort(key=lambda row: (row[1] / row[2], row[0]))
    rows.append(("all", killed.total(), len(results), slow.total()))
    return "\n".join(
        f"{k:4} of {n:3}  {100 * k / n:3.0f} %  {name}" + (f", {late} slow" if late else "")
        for name, k, n, late in rows
    )


def tracked_files(*paths: str) -> list[str]:
    """The tracked files below the paths, by default all."""
    command = ["git", "ls-files", "-z", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=TRUSTED, metavar="PATH")
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws others")
    parser.add_argument("--near", action="store_true", help="only tests of the module's folder")
    parser.add_argument("--native", action="store_true", help="also run the native tests")
    parser.add_argument("--at-least", type=float, default=0, help="percent that must be killed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-o", "--output", type=Path, help="write every mutant as JSON")
    options = parser.parse_args()
    for path in options.paths:
        if not tracked_files(path):
            parser.error(f"{path}: no tracked file")
    modules = [name for name in tracked_files(*options.paths) if name.endswith(".py")]
    mutants = list(draw(modules, options.count, options.seed))
    if not mutants:
        parser.error(f"no module of {', '.join(options.paths)} can be changed")
    results = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees = [copy_of_the_tree(Path(folder) / str(job)) for job in range(options.jobs)]
        parallel = ["-n", str(options.jobs), "--dist", "loadfile"]
        rounds = (rounds_of_tests(of.module, True, False)[0] for of in mutants)
        needed = sorted({folder for *_, folder in rounds}) if options.near else ["tests"]
        if _run_tests(trees[0], ["-m", "not native", *parallel, *needed]) != "lived":
            parser.error("the tests fail without a mutant; run: pytest -m 'not native'")

        def judge(mutant: Mutant) -> Mutant:
            tree = trees.pop()
            try:
                outcome = outcome_of(mutant, tree, options.near, options.native)
            finally:
                trees.append(tree)
            return Mutant(**{**asdict(mutant), "outcome": outcome})

        for result in pool.map(judge, mutants):
            results.append(result)
            print(f"{len(results):4}  {result.outcome}  {result.module}:{result.line}", flush=True)
    for result in results:
        if result.outcome == "lived":
            print(f"\nlived: {result.module}\n{result.diff}")
    print(f"\n{table(results)}")
    if options.output:
        kept = [{**asdict(each), "source": None} for each in results]
        options.output.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    share = 100 * sum(each.outcome == "killed" for each in results) / len(results)
    if share < options.at_least:
        print(f"{share:.0f} % were killed, {options.at_least:.0f} % are required", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
