"""`instr doctor`: what is installed, which library loads, and what is missing."""

from __future__ import annotations

import sys

import click

from llamacpp_instr.base.system import how_to_install
from llamacpp_instr.cli.options import command


@command(
    "instr doctor",
    "instr doctor --json | jq .library.version",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what is installed and what is missing.

    Exits with status 0 if recording works, else 1.
    """
    from llamacpp_instr.base.terminal import print_line, render_json
    from llamacpp_instr.llama.build.doctor import diagnose

    found = diagnose()
    if as_json:
        print_line(render_json(found.as_dict()).rstrip())
        sys.exit(0 if found.ok else 1)
    library = found.library
    rows = [
        ("llamacpp-instr", f"{found.package}, patch set {found.patches or 'not found'}"),
        ("python", found.python),
        ("environment", found.prefix),
        ("llama_cpp", library.version or "cannot be loaded"),
        ("  library", library.path),
        (
            "  recorder",
            f"ABI {library.abi}, patch set {library.patches}" if library.abi else "none",
        ),
        ("  llama.cpp", library.commit),
        ("  features", " | ".join(library.features)),
        ("cpu", f"{found.cpu}, {found.cpus} usable"),
        ("compiler", found.compiler or "none (instr build needs one: apt install g++)"),
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
