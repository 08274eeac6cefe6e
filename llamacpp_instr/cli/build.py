"""`instr build` and `doctor`: install the instrumented llama.cpp, and show what is installed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click
from click import IntRange

from llamacpp_instr.base.terminal import print_line
from llamacpp_instr.cli import options as cli
from llamacpp_instr.llama.build import BACKENDS


@cli.command(
    "instr build                                  # install into this environment",
    "instr build --backend vulkan                 # for a GPU",
    "instr build --programs                       # with llama-server, llama-bench and others",
    "instr build --portable --wheel-dir dist      # a wheel for other machines",
)
def build(
    cmake_args: str = cli.option(
        "Further arguments for CMake.", "ARGS", default="", show_default=False
    ),
    backend: tuple[str, ...] = cli.option(
        "Also build a device backend; may be repeated.",
        "--backend",
        click.Choice(list(BACKENDS)),
        multiple=True,
    ),
    jobs: int | None = cli.option("Parallel compilers.  [default: CPUs]", "--jobs -j", IntRange(1)),
    wheel_dir: Path | None = cli.option(
        "Write the wheel and the programs there; install nothing.",
        type=click.Path(path_type=Path, file_okay=False),
    ),
    portable: bool = cli.flag(
        "Build for any CPU of this architecture; kernels are chosen at run time."
    ),
    programs: bool = cli.flag("Also build llama.cpp's programs, which `instr exec` finds."),
    check: bool = cli.flag("Only check that the patches apply; build nothing."),
) -> None:
    """
    Fetches the source of llama-cpp-python with pip, from the index that pip is configured for, and
    checks, patches and compiles it. A second build with the same inputs takes seconds, because it
    comes from the cache ($LLAMACPP_INSTR_CACHE or ~/.cache/llamacpp-instr).
    """
    from llamacpp_instr.llama.build import wheel as wheels

    if check:
        click.echo(wheels.check_patches())
        return
    try:
        arguments = shlex.split(cmake_args)
    except ValueError as error:
        raise click.BadParameter(f"{error}: {cmake_args!r}", param_hint="--cmake-args") from None
    arguments = [*(word for name in backend for word in BACKENDS[name]), *arguments]
    wheel = wheels.build_wheel(portable=portable, cmake_args=arguments, jobs=jobs)
    if wheel_dir is not None:
        print_line(wheels.copy_wheel(wheel, wheel_dir))
    else:
        new = wheels.install_wheel(wheel)
        print_line(f"{wheel.name} {'is now' if new else 'was already'} installed in {sys.prefix}")
    if programs:
        from llamacpp_instr.llama.build import programs as built

        place = built.build_programs(portable=portable, cmake_args=arguments, jobs=jobs)
        into = built.programs_dir() if wheel_dir is None else wheel_dir / "programs"
        state = "are now" if built.install_programs(place, into) else "were already"
        print_line(f"{', '.join(built.PROGRAMS)} {state} in {into}")


@cli.command("instr doctor", "instr doctor --json | jq .library.version")
def doctor(as_json: bool = cli.flag("Print one JSON object.", "--json")) -> None:
    """Exits with status 0 if recording works, else 1."""
    from llamacpp_instr.base.machine import INSTALL_COMPILER
    from llamacpp_instr.base.system import how_to_install
    from llamacpp_instr.base.terminal import render_json
    from llamacpp_instr.llama.build.doctor import diagnose

    found = diagnose()
    if as_json:
        print_line(render_json(found.as_dict()).rstrip())
        sys.exit(0 if found.ok else 1)
    library = found.library
    recorder = f"ABI {library.abi}, patch set {library.patches}" if library.abi else "none"
    rows = [
        ("llamacpp-instr", f"{found.package}, patch set {found.patches or 'not found'}"),
        ("python", found.python),
        ("environment", found.prefix),
        ("llama_cpp", library.version or "cannot be loaded"),
        ("  library", library.path),
        ("  recorder", recorder),
        ("  llama.cpp", library.commit),
        ("  features", " | ".join(library.features)),
        *(
            (f"  {of['name']}", f"{of['description']}: {of['timed']}")
            for of in found.library.devices
        ),
        ("programs", ", ".join(found.programs) or "none (instr build --programs builds them)"),
        ("cpu", f"{found.cpu}, {found.cpus} usable"),
        ("compiler", found.compiler or f"none (instr build needs one: {INSTALL_COMPILER})"),
        ("untested", found.untested),
        *((f"no {name}", f"needed for {', '.join(uses)}") for name, uses in found.missing.items()),
        *(
            (f"extra {name}", f"missing, for {use}: {how_to_install(name)}")
            for name, use in found.extras.items()
        ),
    ]
    for label, text in rows:
        if text:
            print_line(f"{label:16}{text}")
    print_line("")
    for problem in found.problems:
        print_line(f"problem: {problem}")
    print_line("recording works" if found.ok else "recording does not work")
    sys.exit(0 if found.ok else 1)
