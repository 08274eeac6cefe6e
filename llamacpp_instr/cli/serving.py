"""A page in the browser: its port, and whether a browser opens it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from llamacpp_instr.base.terminal import print_line
from llamacpp_instr.cli.options import gathered


@dataclass(frozen=True)
class Serving:
    """Where a page is served, and whether a browser opens it."""

    port: int | None = None
    no_browser: bool = False

    def show(self, address: str) -> None:
        """Print the address of a page that is served, and open it."""
        import threading
        import webbrowser

        print_line(address)
        if not self.no_browser:
            # some browsers are waited for, and they wait for the page
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def serving_options(of: str = "") -> Callable[[Any], Any]:
    """For a command that serves a page, which gets them as `serving: Serving`."""
    return gathered(
        "serving",
        Serving,
        click.option(
            "--port", type=click.IntRange(0, 65535), help=f"Port{of}.  [default: any free]"
        ),
        click.option("--no-browser", is_flag=True, help="Print the address and open no browser."),
    )
