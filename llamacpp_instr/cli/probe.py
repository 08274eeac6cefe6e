"""`instr probe`: measures the machine for `instr roofline`."""

from __future__ import annotations

import click


@click.command(
    "probe",
    epilog="\b\nExamples:\n  instr probe\n  instr probe -o server.json",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write to FILE, not to the user's cache; - prints the JSON.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def probe(output: str | None, force: bool) -> None:
    """Measure this machine, to judge the speeds in a log.

    Measures how fast threads copy memory, by the amount that they copy, how fast ggml multiplies
    weights of each type, and what an op costs that computes nothing. It takes about a minute, and
    should run on an idle machine. `instr roofline` compares logs of this machine with the result.
    """
    from converters.analyses.probe import probe_reports
    from converters.report.report import render_text
    from llamacpp_instr.build.cache import own_cache
    from llamacpp_instr.output import check_output, open_output
    from llamacpp_instr.probe.file import default_path, probe_json
    from llamacpp_instr.probe.measure import measure
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.terminal import notice

    if output is None:
        own_cache()
        path, force = str(default_path()), True
    else:
        path = output
        check_output(path, force)
    with progress_bar("Measuring") as on_progress:
        measured = measure(on_progress)
    with open_output(path, force) as file:
        file.write(probe_json(measured))
    if path != "-":
        click.echo(render_text(probe_reports(measured)), nl=False)
        notice(f"wrote {path}")
