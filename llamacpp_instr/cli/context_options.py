"""The options of a context, for every command that makes or plans one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--ctx",
        type=int,
        metavar="TOKENS",
        help="Size of the context.  [default: the model's own, at most 4096]",
    ),
    click.option(
        "--batch", type=int, metavar="TOKENS", help="Tokens of one decode at most.  [default: 2048]"
    ),
    click.option(
        "--ubatch", type=int, metavar="TOKENS", help="Tokens of one graph at most.  [default: 512]"
    ),
    click.option("--threads", type=int, help="Threads.  [default: physical cores]"),
    click.option(
        "--cache-type-k",
        default="f16",
        show_default=True,
        metavar="TYPE",
        help="Storage type of the K cache.",
    ),
    click.option(
        "--cache-type-v",
        default="f16",
        show_default=True,
        metavar="TYPE",
        help="Storage type of the V cache.",
    ),
    click.option(
        "--flash-attn",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "on", "off"]),
        help="Flash attention.",
    ),
)


def context_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a context to a command, which gets them as `context: ContextOptions`."""

    @functools.wraps(command)
    def with_context(
        *args: Any,
        ctx: int | None,
        batch: int | None,
        ubatch: int | None,
        threads: int | None,
        cache_type_k: str,
        cache_type_v: str,
        flash_attn: str,
        **others: Any,
    ) -> None:
        from llamacpp_instr.llama.engine import ContextOptions

        context = ContextOptions(
            ctx, batch, ubatch, threads, cache_type_k, cache_type_v, flash_attn
        )
        command(*args, context=context, **others)

    for option in reversed(_OPTIONS):
        with_context = option(with_context)
    return with_context
