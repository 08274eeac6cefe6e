"""`python -m llamacpp_instr` is `instr`."""

from llamacpp_instr.cli import main

if __name__ == "__main__":
    main(prog_name="instr")
