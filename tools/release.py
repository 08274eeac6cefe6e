"""Makes the files of a release and tests them in an empty environment.

Invariant: the files in the directory were installed into an empty environment and used there, and
the sdist builds exactly the same wheel.

    python -m tools.release             dist/: sdist and wheel
    python -m tools.release --native    also the patched llama-cpp-python for every x86-64 CPU
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.llama.build.source_tree import sha256_of
from llamacpp_instr.llama.build.wheel import build_wheel

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "tests" / "fixtures" / "demo-verbose.log"


def _commands(lines: str) -> list[list[str]]:
    return [line.split() for line in lines.strip().splitlines()]


# Commands that need no native library, on a log and on the demo model.
TRIALS = _commands("""
--help
check session.log
cat session.log -o session.log.zst
summary session.log.zst
stats session.log --by layer
diff session.log session.log
to-perfetto session.log
to-perfetto --format json session.log -o session.json
to-parquet session.log --csv -o tables
inspect demo -o demo.html
memory demo
compare demo demo
quality demo demo --only weights
""")
NATIVE_TRIALS = _commands("""
doctor
run demo --prompt Once -n 8 --log demo.log
check demo.log
""")


class ReleaseError(InstrError):
    """A file of the release cannot be made, or does not work."""


def build_distributions(source: Path, directory: Path) -> tuple[Path, Path]:
    """The sdist and the wheel of a source tree, in `directory`.

    The build backend comes from the index, as with pip. Raises ReleaseError with the backend's
    last line.
    """
    requires = re.search(r'^requires = \["(.*)"\]$', (source / "pyproject.toml").read_text(), re.M)
    assert requires is not None, "pyproject.toml names one build backend"
    with tempfile.TemporaryDirectory() as backend:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", backend]
        _run([*pip, requires[1]], source)
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
        _run(command, source, PYTHONPATH=backend)
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return sdist, wheel


def check_sdist(sdist: Path, wheel: Path, work: Path) -> None:
    """Raises ReleaseError unless the sdist builds a wheel that is equal to `wheel` to the byte."""
    shutil.unpack_archive(sdist, work)
    (tree,) = work.iterdir()
    again = build_distributions(tree, work / "again")[1]
    if again.read_bytes() != wheel.read_bytes():
        raise ReleaseError(f"{sdist.name} builds a different {wheel.name} than the source tree")


def check_wheel(wheel: Path, native: Path | None, work: Path) -> None:
    """Install into an environment of its own and use it; raises ReleaseError if a command fails."""
    environment = work / "environment"
    _run([sys.executable, "-m", "venv", str(environment)], work)
    python = str(environment / "bin" / "python")
    shutil.copyfile(LOG, work / "session.log")
    instr = str(environment / "bin" / "instr")
    for installed, trials in ((wheel, TRIALS), (native, NATIVE_TRIALS)):
        if installed is not None:
            _run([python, "-m", "pip", "install", "--quiet", str(installed)], work)
            for trial in trials:
                _run([instr, *trial], work)


def _run(command: Sequence[str], directory: Path, **variables: str) -> None:
    # a variable of the caller must not provide what the environment lacks
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=directory, env={**clean, **variables}, capture_output=True, text=True
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ReleaseError(f"{' '.join(command)} exits with status {done.returncode}: {last}")


def release(directory: Path, native: bool, jobs: int | None, force: bool) -> list[Path]:
    """Make and test the files, then put them into `directory`; returns their new paths."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for name in ("made", "from-sdist", "trial"):
            (place / name).mkdir()
        sdist, wheel = build_distributions(ROOT, place / "made")
        check_absent(directory, [sdist, wheel], force)
        click.echo("building the wheel again from the sdist", err=True)
        check_sdist(sdist, wheel, place / "from-sdist")
        files = [sdist, wheel]
        if native:
            files.append(build_wheel(portable=True, jobs=jobs))
            check_absent(directory, files, force)
        click.echo(f"running {len(TRIALS)} commands in an empty environment", err=True)
        check_wheel(wheel, files[2] if native else None, place / "trial")
        directory.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copyfile(file, directory / file.name)) for file in files]


def check_absent(directory: Path, files: Sequence[Path], force: bool) -> None:
    """Raises UsageError when `directory` has one of the files, unless they may be replaced."""
    there = [file.name for file in files if (directory / file.name).exists()]
    if there and not force:
        raise UsageError(f"{directory} has {', '.join(there)}; use --force to replace")


@click.command()
@click.option("--native", is_flag=True, help="Also build the portable patched llama-cpp-python.")
@click.option("--jobs", type=int, metavar="N", help="Parallel compilers, for --native.")
@click.option("-o", "--output", default="dist", metavar="DIR", help="Target.", show_default=True)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def main(native: bool, jobs: int | None, output: str, force: bool) -> None:
    """Make sdist and wheel, test them in an empty environment, print size and sha256 of each."""
    try:
        for file in release(Path(output), native, jobs, force):
            click.echo(f"{sha256_of(file)}  {file.stat().st_size:>11,}  {file}")
    except InstrError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
