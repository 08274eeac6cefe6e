"""`instr debug`: commands from standard input, on a pipe and on a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Instr, assert_refused

pytestmark = pytest.mark.native

APP = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
print(model("Once upon a time", max_tokens=4, temperature=0)["choices"][0]["text"])
"""


def debug(instr: Instr, commands: str, *options: object) -> str:
    """What the debugger prints; the run must succeed."""
    done = instr("debug", "demo", "-p", "Once upon a time", "-n", 4, *options, input=commands)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_it_stops_at_the_first_op_if_no_breakpoint_is_given(instr: Instr) -> None:
    printed = debug(instr, "continue\n")
    assert "embd = GET_ROWS(token_embd.weight, inp_tokens)" in printed
    assert "embedding lookup" in printed
    assert printed.endswith("log: debug.log\n")


def test_the_text_is_that_of_run(instr: Instr) -> None:
    ran = instr("run", "demo", "-p", "Once upon a time", "-n", 4)
    done = instr("debug", "demo", "-p", "Once upon a time", "-n", 4, input="c\n")
    assert done.stdout == ran.stdout


def test_breakpoints_stop_where_their_condition_holds(instr: Instr) -> None:
    printed = debug(instr, "c\nc\nquit\n", "-b", "ffn_out-* if absmax > 20")
    assert printed.count("breakpoint 1: ffn_out-* if absmax > 20") == 3
    assert "ffn_out-1 = MUL_MAT" in printed


@pytest.mark.parametrize(
    ("condition", "hits"), [("if absmax > 1e30", 0), ("step=99", 0), ("step=0-1 hits=3", 2)]
)
def test_a_breakpoint_that_stops_nothing_is_named_at_the_end(
    condition: str, hits: int, instr: Instr
) -> None:
    assert debug(instr, "zero\ncontinue\n", "-b", f"ffn_out-1 {condition}").splitlines() == [
        "log: debug.log",
        f"breakpoint 1 never stopped the run: ffn_out-1 {condition}  ({hits} hits)",
        "the run never stopped, so no command on standard input was carried out",
    ]


def test_a_run_that_is_ended_says_why_it_is_not_compared(instr: Instr) -> None:
    printed = debug(instr, "scale 1e38\ncontinue\n", "-b", "ffn_out-1")
    assert "ffn_out-1: scale by 1e+38" in printed
    assert "Warning" not in printed
    assert printed.splitlines()[-1].startswith("no comparison with the run without the changes: ")
    assert "KL divergence" not in printed


def test_a_session_of_commands(instr: Instr) -> None:
    commands = """\
step layer
print
print blk.0.attn_norm.weight
tensors cache_k
list
break
break l_out-2
break
delete 1
until result_output
where
nonsense
st
quit
"""
    printed = debug(instr, commands)
    assert "l_out-0 = ADD(ffn_out-0, ffn_inp-0)  F32 5×256" in printed
    assert "absmax 10.1407" in printed
    assert "blk.0.attn_norm.weight  256" in printed
    assert "cache_k_l0" in printed
    assert "->   " in printed
    assert "breakpoint 1: l_out-2" in printed
    assert "1: l_out-2  (0 hits)" in printed
    assert "breakpoint 2: result_output" in printed
    assert "'nonsense' is not a command; `help` lists them" in printed
    assert printed.count("op 130 of 130") == 2


def test_the_end_of_the_commands_ends_the_run_with_a_whole_log(
    instr: Instr,
) -> None:
    assert debug(instr, "", "--log", "a.log").endswith("log: a.log\n")
    assert instr("check", "a.log").returncode == 0


def test_a_program_is_debugged_in_this_process(
    instr: Instr, tmp_path: Path, demo_model: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = instr("debug", "-b", "l_out-3", "--", "app.py", demo_model, input="c\nc\nc\nc\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("breakpoint 1: l_out-3") == 4
    assert len(done.stdout.split()) >= 1
    assert instr("check", "debug.log").returncode == 0


def test_quitting_ends_a_program_too(instr: Instr, tmp_path: Path, demo_model: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = instr("debug", "--", "python", "app.py", demo_model, input="quit\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith("log: debug.log\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo"], "give a model and --prompt TEXT, or a program after --"),
        (["demo", "-p", "a", "--", "app.py"], "not both"),
        (["--"], "no program is given"),
        (["--", "none.py"], "none.py is not a file"),
        (["demo", "-p", "a", "-b", "x if y"], "is not a comparison"),
        (["demo", "-p", "a", "--log", "-"], "the log must be a file"),
        (["none.gguf", "-p", "a"], "none.gguf"),
        # with the page
        (["demo", "--page"], "give a model and --prompt TEXT"),
        (["demo", "-p", "a", "--page", "-b", "x if y"], "is not a comparison"),
        (["none.gguf", "-p", "a", "--page"], "none.gguf"),
        (["demo", "-p", "a", "--page", "--log", "-"], "the log must be a file"),
        (["demo", "-p", "a", "--page", "--ctx", "0"], "--ctx is 0"),
        (["demo", "-p", "a" * 9000, "--page", "--ctx", "16"], "tokens"),
        (["--page", "--", "none.py"], "none.py is not a file"),
        (["demo", "-p", "a", "--port", "1"], "--port and --no-browser are for --page"),
        (["demo", "--dap", "--page"], "--page is not for --dap"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_log(
    instr: Instr, tmp_path: Path, words: list[str], message: str
) -> None:
    assert_refused(instr("debug", *words, input="c\n"), message)
    assert list(tmp_path.glob("*.log")) == []


def test_a_breakpoint_that_no_op_matches_is_one_line_and_leaves_no_log(
    instr: Instr, tmp_path: Path
) -> None:
    done = instr("debug", "demo", "-p", "a", "-b", "ffn_oot-*", input="c\n")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the nearest are ffn_out-" in line
    assert list(tmp_path.glob("*.log")) == []


def test_the_lens_after_the_last_layer_is_what_the_model_says(instr: Instr) -> None:
    lines = debug(instr, "step decode\nlens\nnext\nquit\n").splitlines()
    last = next(line for line in lines if line.startswith("layer   3: "))
    best = next(line for line in lines if line.lstrip().startswith("100.00%"))
    assert "','" in last
    assert "','" in best
    assert [line.split(":")[0].split()[-1] for line in lines if line.startswith("layer  ")] == [
        "0", "1", "2", "3",
    ]  # fmt: skip


def test_attention_is_shown_where_it_is_computed_and_named_where_it_is_gone(instr: Instr) -> None:
    printed = debug(
        instr, "until op=FLASH_ATTN_EXT layer=2\nattention\nattention head=1\nattention 3\nquit\n"
    )
    assert "layer 2, cells 0 to 4, computed from queries and keys" in printed
    assert printed.count("head   ") == 4
    assert printed.count("token   ") == 5
    assert "has not been computed yet" in printed


def differences(printed: str) -> list[list[str]]:
    """The last columns of the comparison with the run without changes: by how much the logits
    differ, and the divergence."""
    return [line.split()[-2:] for line in printed.split("KL divergence, nats\n")[1].splitlines()]


def test_a_change_is_compared_with_the_same_run_without_it(instr: Instr) -> None:
    printed = debug(instr, "ablate layer=3\nscale 1\ncontinue\n")
    assert "layer=3 is left out from this compute on" in printed
    assert "embd: scale by 1" in printed
    assert len(differences(printed)) == 4
    notes = instr("cat", "--event", "note", "debug.log").stdout.splitlines()
    assert len(notes) == 1 + 4


def test_a_change_that_changes_nothing_diverges_by_nothing(instr: Instr) -> None:
    assert differences(debug(instr, "scale 1\ncontinue\n")) == [["0", "0"]] * 4


def test_a_change_of_the_logits_themselves_is_compared(instr: Instr) -> None:
    printed = debug(instr, "until result_output\nprint\nscale 2\ncontinue\n")
    by, divergence = differences(printed)[0]
    assert float(divergence) > 0
    absmax = re.search(r"absmax (\S+)", printed)
    assert absmax
    # doubling adds the logits themselves
    assert float(by) == pytest.approx(float(absmax[1]), rel=5e-3)
    assert differences(printed)[1:] == [["0", "0"]] * 3


WRONG = (
    ("print nonsense", "no tensor 'nonsense'"),
    ("print [7]", "7 is outside a dimension of 5"),
    ("lens 9", "there is no token 9"),
    ("lens now", "'now' is not a whole number"),
    ("next", "embd is not the logits"),
    ("attention head=99", "has not been computed yet"),
    ("set", "give a number first"),
    ("zero token_embd.weight", "is a weight"),
    ("replace none.npy", "none.npy"),
    ("ablate", "give layer=N"),
    ("ablate layer=9", "layer 9"),
    ("step sideways", "give one of op, block, layer, decode"),
    ("delete x", "`break` lists the numbers"),
    ("delete 7", "there is no breakpoint 7"),
    ("help me", "no command is called 'me'"),
    ("print 'a", "No closing quotation"),
)
"""wrong commands, each with words of its message"""


def test_each_wrong_command_gets_one_line_and_the_stop_goes_on(instr: Instr) -> None:
    lines = debug(instr, "".join(f"{command}\n" for command, _ in WRONG) + "quit\n").splitlines()
    # a blank line and four of the stop come before, that of the log comes after
    for line, (command, message) in zip(lines[5:-1], WRONG, strict=True):
        assert message in line, command
