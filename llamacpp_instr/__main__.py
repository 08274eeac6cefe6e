"""Where `instr` and `python -m llamacpp_instr` begin: Ctrl-C is one line from the first import."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        from llamacpp_instr.cli import main as instr

        instr(prog_name="instr")
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
