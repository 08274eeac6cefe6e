"""What a debugger is asked to do, as one line of words: for a terminal, an editor, a page.

Nothing is evaluated as code: the first word of a line is the name of a command.
"""

from __future__ import annotations

import ctypes
import json
import shlex
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.debugger import changes, show
from llamacpp_instr.debugger.ablation import AblatedLayer, ablate_block, ablate_head
from llamacpp_instr.debugger.attention import attention
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.figures import Slice
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.lens import Lens, most_probable
from llamacpp_instr.debugger.listing import Listing, make_listing
from llamacpp_instr.debugger.stop import STEPS, Go, Stop
from llamacpp_instr.llama import native

AROUND = 5
"""lines that `list` shows before and after the stop"""


class Commands:
    """Commands by name; the docstring of each is its help. They raise `UsageError` for what cannot
    be done."""

    def __init__(self, debugger: Debugger) -> None:
        self.debugger = debugger
        self.changes = 0
        """changes that were made, or are made in every compute from now on"""
        self.lens = Lens()
        self._texts: dict[int, str] = {}
        debugger.followers.append(self.lens)
        self.also = ""
        """a line that ends the list of the commands"""
        self._listing: tuple[LiveGraph, Listing] | None = None
        self._at_any_time: dict[str, Callable[[str], str]] = {
            "break": self._break,
            "delete": self._delete,
            "help": self._help,
        }
        self._on_the_way: dict[str, Callable[[str], Go]] = {
            "continue": self._continue,
            "quit": self._quit,
            "step": self._step,
            "until": self._until,
        }
        self._at_a_stop: dict[str, Callable[[Stop, list[str]], str]] = {
            "list": self._list,
            "where": self._where,
            "print": self._print,
            "tensors": self._tensors,
            "tokens": self._tokens,
            "lens": self._look_through,
            "attention": self._attention,
            "next": self._next,
            "set": self._set,
            "zero": self._zero,
            "scale": self._scale,
            "noise": self._noise,
            "replace": self._replace,
            "ablate": self._ablate,
        }

    def named(self, text: str) -> list[str]:
        """The commands whose names begin so."""
        names = (*self._at_any_time, *self._on_the_way, *self._at_a_stop)
        return sorted(name for name in names if name.startswith(text))

    def run(self, line: str, stopped: Callable[[], Stop]) -> str | Go | None:
        """What a command says, or how to go on; None if the line is not a command. Raises
        `UsageError`; so does `stopped` if the model is not."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if command in self._at_any_time:
            return self._at_any_time[command](rest)
        if command not in self.named(command):
            return None
        stop = stopped()
        if command in self._on_the_way:
            return self._on_the_way[command](rest)
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise UsageError(f"{line!r}: {error}") from None
        return self._at_a_stop[command](stop, words)

    def _help(self, text: str) -> str:
        """help [COMMAND]: the commands, or what one does."""
        every: dict[str, object] = {**self._at_any_time, **self._on_the_way, **self._at_a_stop}
        texts = [cleandoc(every[name].__doc__ or "") for name in self.named(text)]
        if not texts:
            raise UsageError(f"no command is called {text!r}; `help` lists them")
        if len(texts) == 1:
            return texts[0]
        return "\n".join([*(f"  {of.splitlines()[0]}" for of in texts), self.also]).rstrip()

    # --- how to go on ---

    def _step(self, rest: str) -> Go:
        """step [op|block|layer|decode]: run to the end of the next op, block, layer or decode."""
        if (rest or "op") not in STEPS:
            raise UsageError(f"step {rest[:60]}: give one of {', '.join(STEPS)}")
        return STEPS[rest or "op"]

    def _continue(self, _rest: str) -> Go:
        """continue: run to the next breakpoint."""
        return Go.ON

    def _until(self, rest: str) -> Go:
        """until BREAKPOINT: run to a place once, as `until l_out-3`."""
        self.debugger.add(rest, once=True)
        return Go.ON

    def _quit(self, _rest: str) -> Go:
        """quit: end the run. The log is whole."""
        return Go.QUIT

    # --- breakpoints ---

    def _break(self, rest: str) -> str:
        """break PATTERN [op=OP] [layer=3-5] [block=NAME] [step=N] [token=N] [hits=N] [if CONDITION]

        Stop after ops whose names match. A condition compares absmax, min, max, mean, std, nan,
        inf or zero: `break ffn_out-* if absmax > 60 or nan`. Without arguments: the breakpoints.
        """
        if rest:
            point = self.debugger.add(rest)
            return f"breakpoint {point.number}: {point.text}"
        lines = [f"{p.number}: {p.text}  ({p.hits} hits)" for p in self.debugger.breakpoints]
        return "\n".join(lines) or "there are no breakpoints"

    def _delete(self, rest: str) -> str:
        """delete NUMBER: remove a breakpoint."""
        if not rest.isdecimal() or len(rest) > 9:
            raise UsageError("delete NUMBER; `break` lists the numbers")
        self.debugger.remove(int(rest))
        return f"breakpoint {int(rest)} is removed"

    # --- look ---

    def _where(self, stop: Stop, _words: list[str]) -> str:
        """where: the op that has just run."""
        return show.describe_stop(stop)

    def _list(self, stop: Stop, words: list[str]) -> str:
        """list [all]: the ops around this one, in the order in which they run."""
        if self._listing is None or self._listing[0] is not stop.graph:
            self._listing = stop.graph, make_listing(stop.graph)
        listing = self._listing[1]
        here = listing.line_of[stop.node.index]
        return "\n".join(
            f"{'->' if at == here else '  '} {at:4} {line}"
            for at, line in enumerate(listing.lines, 1)
            if words == ["all"] or abs(at - here) <= AROUND
        )

    def _print(self, stop: Stop, words: list[str]) -> str:
        """print [TENSOR] [SLICE]: figures and values of the op's result, or of a tensor at hand.

        A slice is one of numpy's, as [3, :8]: token 3, the first eight values.
        """
        name, part = _place(words)
        return show.describe_tensor(stop, name, part)

    def _tensors(self, stop: Stop, words: list[str]) -> str:
        """tensors [TEXT]: the tensors whose values are in memory; TEXT is a part of their names."""
        text = " ".join(words)
        names = [name for name in stop.at_hand() if text in name]
        return "\n".join(names) or f"no tensor at hand has {text!r} in its name"

    def _tokens(self, stop: Stop, _words: list[str]) -> str:
        """tokens: the tokens of this compute and their positions."""
        return show.describe_tokens(stop, self.text)

    def _look_through(self, stop: Stop, words: list[str]) -> str:
        """lens [TOKEN]: the logit lens, what the model would say if it ended after each layer.

        TOKEN is the number of a token of this compute, the last one if it is left out.
        """
        token = _number("lens", words[0]) if words else -1
        return show.lens_table(self.lens.look(stop, token), self.text)

    def _attention(self, stop: Stop, words: list[str]) -> str:
        """attention [LAYER] [head=N]: how much each token looks at each cell of the KV cache.

        Without a head, the last token of each head.
        """
        head = next((_number("head", w[5:]) for w in words if w.startswith("head=")), None)
        layers = [_number("attention", word) for word in words if "=" not in word]
        return show.attention_table(attention(stop, layers[0] if layers else None), head)

    def _next(self, stop: Stop, _words: list[str]) -> str:
        """next: the most probable next tokens, once the logits are there."""
        vocabulary = _Vocabulary(self.debugger.context)
        values = stop.values()
        if values.shape[-1] != vocabulary.n:
            raise UsageError(
                f"{stop.node.name} is not the logits; `until result_output` runs there"
            )
        logits = np.atleast_2d(values)[-1]
        return show.probability_table(most_probable(logits, 10), self.text)

    def text(self, token: int) -> str:
        """The text of a token of the context that computes."""
        if token not in self._texts:
            self._texts[token] = _Vocabulary(self.debugger.context).text(token)
        return self._texts[token]

    # --- change ---

    def _set(self, stop: Stop, words: list[str]) -> str:
        """set VALUE [TENSOR] [SLICE]: every value, or those of a slice, becomes VALUE."""
        return self._change(stop, changes.set_to(_float("set", words)), words[1:])

    def _zero(self, stop: Stop, words: list[str]) -> str:
        """zero [TENSOR] [SLICE]: every value becomes 0."""
        return self._change(stop, changes.zero(), words)

    def _scale(self, stop: Stop, words: list[str]) -> str:
        """scale FACTOR [TENSOR] [SLICE]: every value times FACTOR."""
        return self._change(stop, changes.scale(_float("scale", words)), words[1:])

    def _noise(self, stop: Stop, words: list[str]) -> str:
        """noise DEVIATION [TENSOR] [SLICE]: adds normal noise, the same at every call."""
        return self._change(stop, changes.add_noise(_float("noise", words), 0), words[1:])

    def _replace(self, stop: Stop, words: list[str]) -> str:
        """replace FILE [TENSOR] [SLICE]: the values of an .npy, .npz or .safetensors file."""
        if not words:
            raise UsageError("replace FILE: give the name of a file")
        return self._change(stop, changes.replace(Path(words[0]), words[0]), words[1:])

    def _ablate(self, _stop: Stop, words: list[str]) -> str:
        """ablate layer=N [head=H | block=attention | block=feed-forward]: in this and every later
        compute, what a layer, a head or a block adds to the residual stream is left out."""
        options = dict(word.partition("=")[::2] for word in words)
        if "layer" not in options or set(options) - {"layer", "head", "block"} or len(options) > 2:
            raise UsageError("ablate: give layer=N, and perhaps head=H or block=NAME")
        layer = _number("layer", options["layer"])
        follower: Any
        if "head" in options:
            follower = ablate_head(layer, _number("head", options["head"]), self._note)
        elif "block" in options:
            block = options["block"]
            if block not in ("attention", "feed-forward"):
                raise UsageError("ablate: block is attention or feed-forward")
            follower = ablate_block(layer, block, self._note)  # type: ignore[arg-type]
        else:
            follower = AblatedLayer(layer, self._note)
        now = self.debugger.follow(follower)
        self.changes += 1
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
        """Change a tensor, as `changes.change` does; it is noted in the log and counts."""
        changes.change(stop, edit, self._note, name, part, address)
        self.changes += 1

    def _note(self, name: str, data: Any) -> None:
        if native.load().note(name, json.dumps(data)) != 0:
            raise InstrError("the change could not be written to the log")


class _Vocabulary:
    """The vocabulary of the model of a `llama_context *`."""

    def __init__(self, context: int) -> None:
        self._api: Any = native.import_llama_cpp().llama_cpp
        model = self._api.llama_get_model(context)
        self._vocab = self._api.llama_model_get_vocab(model)
        self._has_text = self._api.llama_vocab_type(self._vocab) != self._api.LLAMA_VOCAB_TYPE_NONE
        self.n = int(self._api.llama_vocab_n_tokens(self._vocab))

    def text(self, token: int) -> str:
        """A token as text; special tokens by their names, `#5` without a tokenizer."""
        if not self._has_text or not 0 <= token < self.n:
            return f"#{token}"
        buffer = ctypes.create_string_buffer(256)
        size = self._api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(size, 0)].decode(errors="replace")


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
