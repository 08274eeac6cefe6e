"""What a shell completes as the values of options: keys, ops and types.

`eval "$(_INSTR_COMPLETE=bash_source instr)"` turns completion on.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


def keys(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """`--by A,B` of `instr stats`."""
    from llamacpp_instr.converters.analyses.stats_keys import BYS

    return _items(BYS, typed)


def ops(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """`--ops A,B`: the ops of ggml."""
    from llamacpp_instr.log.graph.words import OPS

    return _items(OPS, typed)


def file_types(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """`--types A,B`: what llama.cpp's quantizer can write."""
    from llamacpp_instr.lab.quantize.plan import WRITABLE

    return _items(WRITABLE, typed)


def tensor_types(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """`--output-type A` and `--tensor-type PATTERN=A`."""
    from llamacpp_instr.lab.quantize.plan import TENSOR_TYPES

    return _items(TENSOR_TYPES, typed, "=")


def _items(names: Iterable[str], typed: str, separator: str = ",") -> list[CompletionItem]:
    """The names that continue what follows the last separator, in any case, with what precedes it:
    a shell replaces the whole word."""
    before, found, last = typed.rpartition(separator)
    return [
        CompletionItem(f"{before}{found}{name}")
        for name in names
        if name.lower().startswith(last.lower()) and name not in before.split(separator)
    ]
