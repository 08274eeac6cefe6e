"""The entry point of `instr` and `python -m llamacpp_instr`. Ctrl-C prints one line, even while
modules are imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        from llamacpp_instr.cli import main as instr

        instr(prog_name="instr")
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
