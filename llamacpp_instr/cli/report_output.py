"""The options of every command that makes a report, and the only place that writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamacpp_instr.cli.options import gathered
from llamacpp_instr.errors import UsageError

if TYPE_CHECKING:
    from converters.report.charts import Chart
    from converters.report.page import Figure
    from converters.report.render import Form
    from converters.report.report import Report

_FORMS = (
    click.option("--json", "flag", flag_value="json", help="Print JSON: raw numbers with units."),
    click.option("--csv", "flag", flag_value="csv", help="Print CSV: one table, raw numbers."),
    click.option("--md", "flag", flag_value="md", help="Print Markdown."),
    click.option("--html", "flag", flag_value="html", help="Print one HTML page."),
)
_FILE = (
    click.option(
        "-o",
        "--output",
        "path",
        default="-",
        metavar="FILE",
        help="Write to FILE; .json, .csv, .md and .html choose the format.",
    ),
    click.option("--force", is_flag=True, help="Overwrite files that exist."),
)

_WRITTEN_BY = {
    ".pftrace": ("--perfetto", "`instr to-perfetto`"),
    ".png": ("--heat-map", "`instr blocks --heat-map`"),
    ".svg": ("--heat-map", "`instr blocks --heat-map`"),
}
"""the option of the same command, or the command, that writes files with a suffix"""


@dataclass(frozen=True)
class ReportOutput:
    """Where a report goes, and in which format."""

    flag: str | None
    path: str = "-"
    force: bool = False

    @property
    def form(self) -> Form:
        from converters.report.render import form_of

        return form_of(self.flag, self.path)

    def check(self, *inputs: str | Path | None, exports: Sequence[str] = ()) -> None:
        """Raise `UsageError` if the output cannot be written, is one of `inputs`, or has the suffix
        of something else; `exports` are those of the command beside its report."""
        from converters.report.render import SUFFIXES
        from llamacpp_instr.output import check_not_input, check_output

        check_output(self.path, self.force)
        check_not_input(self.path, *inputs)
        suffix = Path(self.path).suffix.lower()
        if self.flag is None and suffix not in ("", ".txt", *SUFFIXES, *exports):
            mine = {name for of in click.get_current_context().command.params for name in of.opts}
            meant = [name for name in _WRITTEN_BY.get(suffix, ()) if name[0] != "-" or name in mine]
            raise UsageError(
                f"-o {self.path}: a report is .txt, {', '.join(SUFFIXES)}"
                + (f"; {suffix} is written by {meant[0]}" if meant else "")
            )

    def write(
        self,
        reports: Sequence[Report],
        *,
        table: Report | None = None,
        charts: Sequence[Chart | Figure] = (),
        title: str | None = None,
    ) -> None:
        """Write the reports in the chosen format; the arguments are those of `render`. A file is
        not as wide as the terminal that it was written from."""
        from converters.report.render import render
        from llamacpp_instr.terminal import PIPE

        width = None if self.path == "-" else PIPE
        self.write_text(
            render(self.form, reports, table=table, charts=charts, title=title, width=width)
        )

    def write_several(
        self, named: Sequence[tuple[str, Sequence[Report], Report | None]], **more: Any
    ) -> None:
        """Write the reports of several logs, with the arguments of `side_by_side` and `write`."""
        from converters.report.side_by_side import side_by_side

        reports, table = side_by_side(named)
        self.write(reports, table=table, **more)

    def write_text(self, text: str) -> None:
        """Write what was rendered, whole."""
        from llamacpp_instr.output import open_output
        from llamacpp_instr.terminal import abandon_standard_output

        try:
            with open_output(self.path, self.force) as file:
                file.write(text.encode())
        except BrokenPipeError:
            abandon_standard_output()  # the reader closed the pipe; a verdict may still follow


def default_name(log: str, suffix: str, what: str) -> str:
    """The name of an output beside its log. Raises UsageError for standard input; `what` is what
    to name."""
    if log == "-":
        raise UsageError(f"name the {what} with -o: standard input has no name")
    name = Path(log)
    while name.suffix in (".gz", ".zst", ".log", ".ndjson", ".jsonl"):
        name = name.with_suffix("")
    return f"{name}.{suffix}"


report_options = gathered("output", ReportOutput, *_FORMS, *_FILE)
"""adds --json, --csv, --md, --html, -o and --force to a command, as the argument `output`"""

form_options = gathered("report", ReportOutput, *_FORMS)
"""adds --json, --csv, --md and --html to a command, as the argument `report`"""
