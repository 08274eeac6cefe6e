"""The commands of a debugger, each one line of words: for a terminal, an editor, a page; and the
terminal, which prints each stop and asks how to go on.

Nothing is evaluated as code: the first word of a line is the name of a command. Invariant: what a
model's file names is printed escaped (`terminal.printable`).
"""

from __future__ import annotations

import cmd
import ctypes
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import counted, handled, printable_text
from llamacpp_instr.debugger import changes
from llamacpp_instr.debugger.attention import attention
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.residual import Lens, most_probable
from llamacpp_instr.debugger.stop import STEPS, Debugger, Follower, Go, Stop
from llamacpp_instr.debugger.tensors import Slice, figures_of, parse_slice
from llamacpp_instr.llama import native

AROUND = 5  # lines that `list` shows before and after the stop
_FEW = 6  # values that are printed of a row
_SHADES = " ░▒▓█"
_MOST_CELLS = 64  # columns of a picture of attention

_AT_ANY_TIME = ("break", "delete", "help")
_ON_THE_WAY = ("continue", "quit", "step", "until")


class Commands:
    """A method `do_NAME` for each command; its docstring is the command's help. They raise
    `UsageError` for what cannot be done."""

    def __init__(self, debugger: Debugger, also: str = "") -> None:
        """`also` is a line that ends the list of the commands."""
        self.debugger, self._also = debugger, also
        self.lens = Lens()
        self._texts: dict[int, str] = {}
        debugger.followers.append(self.lens)

    def named(self, text: str) -> list[str]:
        """The commands whose names begin with `text`."""
        return [name[3:] for name in dir(self) if name.startswith(f"do_{text}")]

    def run(self, line: str, stopped: Callable[[], Stop]) -> str | Go | None:
        """What a command prints, or how to go on; None if the line is not a command. Raises
        `UsageError`; so does `stopped` if the model is not stopped."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name not in self.named(name):
            return None
        command: Callable[..., str | Go] = getattr(self, f"do_{name}")
        if name in _AT_ANY_TIME:
            return command(rest)
        stop = stopped()
        if name in _ON_THE_WAY:
            return command(rest)
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise UsageError(f"{line!r}: {error}") from None
        return command(stop, words)

    def do_help(self, text: str) -> str:
        """help [COMMAND]: the commands, or what one does."""
        texts = [cleandoc(getattr(self, f"do_{name}").__doc__) for name in self.named(text)]
        if not texts:
            raise UsageError(f"no command is called {text!r}; `help` lists them")
        if len(texts) == 1:
            return texts[0]
        return "\n".join([*(f"  {of.splitlines()[0]}" for of in texts), self._also]).rstrip()

    # --- how to go on ---

    def do_step(self, rest: str) -> Go:
        """step [op|block|layer|decode]: run to the end of the next op, block, layer or decode."""
        if (rest or "op") not in STEPS:
            raise UsageError(f"step {rest[:60]}: give one of {', '.join(STEPS)}")
        return STEPS[rest or "op"]

    def do_continue(self, _rest: str) -> Go:
        """continue: run to the next breakpoint."""
        return Go.ON

    def do_until(self, rest: str) -> Go:
        """until BREAKPOINT: run to a place once, for example `until l_out-3`."""
        self.debugger.add(rest, once=True)
        return Go.ON

    def do_quit(self, _rest: str) -> Go:
        """quit: end the run. The log is whole."""
        return Go.QUIT

    # --- breakpoints ---

    def do_break(self, rest: str) -> str:
        """break PATTERN [op=OP] [layer=3-5] [block=NAME] [step=N] [token=N] [hits=N] [if CONDITION]

        Stop after ops whose names match. A condition compares absmax, min, max, mean, std, nan,
        inf or zero: `break ffn_out-* if absmax > 60 or nan`. Without arguments: the breakpoints.
        """
        if rest:
            point = self.debugger.add(rest)
            return f"breakpoint {point.number}: {point.text}"
        lines = [f"{p.number}: {p.text}  ({p.hits} hits)" for p in self.debugger.breakpoints]
        return "\n".join(lines) or "there are no breakpoints"

    def do_delete(self, rest: str) -> str:
        """delete NUMBER: remove a breakpoint."""
        if not rest.isdecimal() or len(rest) > 9:
            raise UsageError("delete NUMBER; `break` lists the numbers")
        self.debugger.remove(int(rest))
        return f"breakpoint {int(rest)} is removed"

    # --- look ---

    def do_where(self, stop: Stop, _words: list[str]) -> str:
        """where: the op that has just run."""
        return describe_stop(stop)

    def do_list(self, stop: Stop, words: list[str]) -> str:
        """list [all]: the ops around this one, in the order in which they run."""
        listing = stop.graph.listing
        here = listing.line_of[stop.node.index]
        return "\n".join(
            f"{'->' if at == here else '  '} {at:4} {line}"
            for at, line in enumerate(listing.lines, 1)
            if words == ["all"] or abs(at - here) <= AROUND
        )

    def do_print(self, stop: Stop, words: list[str]) -> str:
        """print [TENSOR] [SLICE]: figures and values of the op's result, or of a tensor at hand.

        A slice is written as in numpy: [3, :8] is token 3, the first eight values.
        """
        name, part = _place(words)
        values = stop.values(name)
        values = np.asarray(values[parse_slice(part, values.shape)])
        figures = [
            f"{figure} {value:,}" if isinstance(value, int) else f"{figure} {value:.6g}"
            for figure, value in figures_of(values).items()
            if value is not None
        ]
        shape = "×".join(str(n) for n in values.shape) or "one value"
        ends = np.array2string(values, threshold=4 * _FEW, edgeitems=_FEW // 2, precision=5)
        return f"{name or stop.node.name}{part}  {shape}\n  {'  '.join(figures)}\n{ends}"

    def do_tensors(self, stop: Stop, words: list[str]) -> str:
        """tensors [TEXT]: the tensors whose values are in memory; TEXT is a part of their names."""
        text = " ".join(words)
        names = [name for name in stop.at_hand() if text in name]
        return "\n".join(names) or f"no tensor at hand has {text!r} in its name"

    def do_tokens(self, stop: Stop, _words: list[str]) -> str:
        """tokens: the tokens of this compute and their positions."""
        tokens = stop.ubatch.tokens
        if tokens is None:
            return "this compute has embeddings instead of tokens"
        return "\n".join(
            f"{number:4}  position {position}  {token:6}  {self.text(token)!r}"
            for number, position, token in stop.ubatch.numbered()
        )

    def do_lens(self, stop: Stop, words: list[str]) -> str:
        """lens [TOKEN]: the logit lens, what the model would say if it ended after each layer.

        TOKEN is the number of a token of this compute, the last one if it is left out.
        """
        lines = []
        for guess in self.lens.look(stop, _number("lens", words[0]) if words else -1):
            best = [f"{share:5.1%} {self.text(token)!r:12}" for token, share in guess.top(3)]
            lines.append(f"layer {guess.layer:3}: {'  '.join(best)}".rstrip())
        return "\n".join(lines)

    def do_attention(self, stop: Stop, words: list[str]) -> str:
        """attention [LAYER] [head=N]: how much each token looks at each cell of the KV cache.

        Without a head, the last token of each head.
        """
        head = next((_number("head", w[5:]) for w in words if w.startswith("head=")), None)
        layers = [_number("attention", word) for word in words if "=" not in word]
        seen = attention(stop, layers[0] if layers else None)
        heads = len(seen.weights)
        if head is not None and not 0 <= head < heads:
            raise UsageError(f"there is no head {head}; this layer's are 0 to {heads - 1}")
        first = max(0, seen.used - _MOST_CELLS)
        computed = ", computed from queries and keys" if seen.computed else ""
        lines = [f"layer {seen.layer}, cells {first} to {seen.used - 1}{computed}"]
        # as shades, from 0 to the row's own maximum
        for number, row in enumerate(seen.weights[:, -1] if head is None else seen.weights[head]):
            best = np.argsort(-row, kind="stable")[:3]
            most = ", ".join(f"{cell}: {row[cell]:.2f}" for cell in best)
            shades = row[first : seen.used] / max(row.max(), 1e-30) * len(_SHADES)
            drawn = "".join(_SHADES[min(int(shade), len(_SHADES) - 1)] for shade in shades)
            lines.append(f"{'head' if head is None else 'token'} {number:3} |{drawn}| {most}")
        return "\n".join(lines)

    def do_next(self, stop: Stop, _words: list[str]) -> str:
        """next: the most probable next tokens, once the logits are computed."""
        api, vocabulary = self._vocabulary()
        values = stop.values()
        if values.shape[-1] != api.llama_vocab_n_tokens(vocabulary):
            raise UsageError(
                f"{stop.node.name} is not the logits; `until result_output` runs there"
            )
        best = most_probable(np.atleast_2d(values)[-1], 10)
        return "\n".join(f"{share:7.2%}  {token:6}  {self.text(token)!r}" for token, share in best)

    def text(self, token: int) -> str:
        """The text of a token; special tokens by their names, `#5` without a tokenizer."""
        if token not in self._texts:
            api, vocabulary = self._vocabulary()
            has_text = api.llama_vocab_type(vocabulary) != api.LLAMA_VOCAB_TYPE_NONE
            if not has_text or not 0 <= token < api.llama_vocab_n_tokens(vocabulary):
                self._texts[token] = f"#{token}"
            else:
                buffer = ctypes.create_string_buffer(256)
                size = api.llama_token_to_piece(vocabulary, token, buffer, len(buffer), 0, True)
                self._texts[token] = buffer.raw[: max(size, 0)].decode(errors="replace")
        return self._texts[token]

    def _vocabulary(self) -> tuple[Any, Any]:
        """llama.cpp's API, and the vocabulary of the model that computes."""
        api: Any = native.import_llama_cpp().llama_cpp
        return api, api.llama_model_get_vocab(api.llama_get_model(self.debugger.context))

    # --- change ---

    def do_set(self, stop: Stop, words: list[str]) -> str:
        """set VALUE [TENSOR] [SLICE]: every value, or those of a slice, becomes VALUE."""
        return self._change(stop, changes.set_to(_float("set", words)), words[1:])

    def do_zero(self, stop: Stop, words: list[str]) -> str:
        """zero [TENSOR] [SLICE]: every value becomes 0."""
        return self._change(stop, changes.zero(), words)

    def do_scale(self, stop: Stop, words: list[str]) -> str:
        """scale FACTOR [TENSOR] [SLICE]: every value times FACTOR."""
        return self._change(stop, changes.scale(_float("scale", words)), words[1:])

    def do_noise(self, stop: Stop, words: list[str]) -> str:
        """noise DEVIATION [TENSOR] [SLICE]: adds normal noise, the same at every call."""
        return self._change(stop, changes.add_noise(_float("noise", words), 0), words[1:])

    def do_replace(self, stop: Stop, words: list[str]) -> str:
        """replace FILE [TENSOR] [SLICE]: the values of an .npy, .npz or .safetensors file."""
        if not words:
            raise UsageError("replace FILE: give the name of a file")
        return self._change(stop, changes.replace(Path(words[0]), words[0]), words[1:])

    def do_ablate(self, _stop: Stop, words: list[str]) -> str:
        """ablate layer=N [head=H | block=attention | block=feed-forward]: in this and every later
        compute, what a layer, a head or a block adds to the residual stream is left out."""
        options = dict(word.partition("=")[::2] for word in words)
        if "layer" not in options or set(options) - {"layer", "head", "block"} or len(options) > 2:
            raise UsageError("ablate: give layer=N, and optionally head=H or block=NAME")
        layer, block = _number("layer", options["layer"]), options.get("block")
        if block not in (None, "attention", "feed-forward"):
            raise UsageError("ablate: block is attention or feed-forward")
        follower: Follower
        if "head" in options:
            follower = changes.ablate_head(layer, _number("head", options["head"]), self._note)
        elif block is not None:
            follower = changes.ablate_block(layer, block, self._note)  # type: ignore[arg-type]
        else:
            follower = changes.AblatedLayer(layer, self._note)
        now = self.debugger.follow(follower)
        self.debugger.changes += 1
        return f"{' '.join(words)} is left out from {'this' if now else 'the next'} compute on"

    def _change(self, stop: Stop, edit: changes.Edit, words: list[str]) -> str:
        name, part = _place(words)
        self.apply(stop, edit, name, part)
        return f"{name or stop.node.name}{part}: {edit.what}"

    def apply(
        self,
        stop: Stop,
        edit: changes.Edit,
        name: str | None = None,
        part: str | Slice = "",
        address: int | None = None,
    ) -> None:
        """Change a tensor, as `changes.change` does; the change is noted in the log and counted."""
        changes.change(stop, edit, self._note, name, part, address)
        self.debugger.changes += 1

    def _note(self, name: str, data: Any) -> None:
        if native.load().note(name, json.dumps(data)) != 0:
            raise InstrError("the change could not be written to the log")


def _place(words: list[str]) -> tuple[str | None, str]:
    """The name of a tensor, None for the op's result, and a slice."""
    name, bracket, part = " ".join(words).partition("[")
    return name.strip() or None, bracket + part


def _number(what: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"{what}: {word!r} is not a whole number") from None


def _float(command: str, words: list[str]) -> float:
    try:
        return float(words[0])
    except (IndexError, ValueError):
        raise UsageError(f"{command}: give a number first") from None


def describe_stop(stop: Stop) -> str:
    """Where a compute waits and why."""
    node = stop.node
    place = f"layer {node.layer}, {node.block}" if node.layer >= 0 else node.block
    tokens = counted(stop.n_tokens, "token")
    where = f"step {stop.step}, {tokens}; op {node.index + 1} of {len(stop.graph)}; {place}"
    return "\n".join((stop.why, where, f"  {node}", f"  {node.purpose}"))


class Terminal(cmd.Cmd):
    """Asks for commands at each stop; `on_stop` is what a `Debugger` calls."""

    prompt = "(instr) "

    def __init__(self, breakpoints: Sequence[str] = ()) -> None:
        """Without breakpoints the first op is a stop. Raises `UsageError` for a wrong one."""
        super().__init__(stdin=sys.stdin, stdout=sys.stderr)
        # a terminal completes and remembers lines; a pipe is read as it is
        self.use_rawinput = sys.stdin.isatty()
        if not self.use_rawinput:
            self.prompt = ""
        self.debugger = Debugger(self.on_stop)
        self.commands = Commands(self.debugger)
        self.debugger.on_graph = self._check
        self.debugger.go = Go.ON if breakpoints else Go.OP
        for text in breakpoints:
            self.debugger.add(text)
        self._stop: Stop | None = None
        self._go = Go.ON

    def on_stop(self, stop: Stop) -> Go:
        """Print where the compute is, and read commands until one goes on."""
        self._stop = stop
        self._write(f"\n{describe_stop(stop)}")
        try:
            with handled(signal.default_int_handler, "SIGINT"):  # also in a callback from C
                self.cmdloop()
        except KeyboardInterrupt:
            self._go = Go.QUIT
            os.kill(os.getpid(), signal.SIGINT)  # for the code that runs the model
        return self._go

    def end(self) -> None:
        """After the run: print what did not happen, and why."""
        for point in self.debugger.breakpoints:
            if point.hits < point.from_hit:
                self._write(
                    f"breakpoint {point.number} never stopped the run: {point.text}"
                    f"  ({point.hits} hits)"
                )
        if self._stop is None and not self.use_rawinput:
            self._write("the run never stopped, so no command on standard input was carried out")
        if self.debugger.changes and self.debugger.go is Go.QUIT:
            self._write(
                "no comparison with the run without the changes: this run was ended at a stop; end"
                " the commands with `delete NUMBER` and `continue`, or give the breakpoint step=N"
            )

    def _check(self, graph: LiveGraph) -> None:
        """Raises `UsageError` if a breakpoint matches nothing of the first graph."""
        self.debugger.on_graph = lambda _graph: None
        for point in self.debugger.breakpoints:
            point.check(graph)

    @property
    def _now(self) -> Stop:
        assert self._stop is not None
        return self._stop

    def _write(self, text: str) -> None:
        print(printable_text(text), file=sys.stderr, flush=True)

    # --- cmd.Cmd ---

    def onecmd(self, line: str) -> bool:
        """Run a command, whose name may be shortened as long as no other begins the same way."""
        if not line.strip():
            return False
        _, _, line = self.parseline(line)
        word = line.split()[0]
        known = ["quit"] if word == "EOF" else self.completenames(word)
        try:
            if word not in known and len(known) != 1:
                hint = f": {', '.join(known)}" if known else "; `help` lists them"
                kind = "more than one" if known else "not a"
                raise UsageError(f"{word!r} is {kind} command{hint}")
            name = word if word in known else known[0]
            output = self.commands.run(name + line[len(word) :], lambda: self._now)
        except InstrError as error:
            output = str(error)
        if isinstance(output, Go):
            self._go = output
            return True
        self._write(output or "")
        return False

    def completenames(self, text: str, *_: object) -> list[str]:
        return self.commands.named(text)

    def completedefault(self, text: str, *_: object) -> list[str]:
        """Names of tensors."""
        return [name for name in self._now.graph.by_name if name.startswith(text)]
