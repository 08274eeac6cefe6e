"""`instr build`: build the instrumented llama-cpp-python and install it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from llamacpp_instr.cli.options import command


@command(
    "instr build                                  # install into this environment",
    'instr build --cmake-args "-DGGML_CUDA=ON"    # with a device backend',
    "instr build --portable --wheel-dir dist      # a wheel for other machines",
)
@click.option("--cmake-args", default="", metavar="ARGS", help="Further arguments for CMake.")
@click.option("--jobs", "-j", type=click.IntRange(1), help="Compilers at once.  [default: CPUs]")
@click.option(
    "--wheel-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the wheel there and do not install it.",
)
@click.option(
    "--portable",
    is_flag=True,
    help="Build for any CPU of this architecture; kernels are chosen at run time.",
)
@click.option("--check", is_flag=True, help="Only check that the patches apply; build nothing.")
def build(
    cmake_args: str, jobs: int | None, wheel_dir: Path | None, portable: bool, check: bool
) -> None:
    """Build and install the instrumented llama.cpp.

    Fetches the source of llama-cpp-python with pip, from the index that pip is configured for, and
    checks, patches and compiles it. A second build with the same inputs takes seconds, because it
    comes from the cache ($LLAMACPP_INSTR_CACHE or ~/.cache/llamacpp-instr).
    """
    from llamacpp_instr.base.terminal import print_line
    from llamacpp_instr.llama.build.wheel import (
        build_wheel,
        check_patches,
        copy_wheel,
        install_wheel,
    )

    if check:
        click.echo(check_patches())
        return
    try:
        arguments = shlex.split(cmake_args)
    except ValueError as error:
        raise click.BadParameter(f"{error}: {cmake_args!r}", param_hint="--cmake-args") from None
    wheel = build_wheel(portable=portable, cmake_args=arguments, jobs=jobs)
    if wheel_dir is not None:
        print_line(copy_wheel(wheel, wheel_dir))
        return
    new = install_wheel(wheel)
    print_line(f"{wheel.name} {'is now' if new else 'was already'} installed in {sys.prefix}")
