"""`instr probe`: measures the machine for `instr roofline`."""

from __future__ import annotations

import click

from llamacpp_instr.cli.options import command, force_option


@command("instr probe")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write to FILE, not to the user's cache; - prints the JSON.",
)
@force_option
def probe(output: str | None, force: bool) -> None:
    """Measure this machine, for roofline and predict.

    Measures how fast threads copy memory, by the amount that they copy, how fast ggml multiplies
    weights of each type, and the cost of an op that computes nothing. Then it records small random
    models, and fits what each kernel costs. All this is done with 1, 2, 4 and more threads, up to
    as many as `instr run` uses, and takes minutes. Run it while no other process computes: it
    measures implausible figures again, and leaves them out if they remain so. `instr roofline`
    compares logs of this machine with the result, and `instr predict` predicts models.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.base.system import how_to_install, missing_modules
    from llamacpp_instr.base.terminal import notice, progress_bar
    from llamacpp_instr.converters.analyses.probe import probe_reports
    from llamacpp_instr.llama.build.wheel import own_cache
    from llamacpp_instr.prediction.probe.file import default_path, probe_json
    from llamacpp_instr.prediction.probe.measure import measure, thread_counts
    from llamacpp_instr.report.text import render_text

    if output is None:
        own_cache()
        path, force = str(default_path()), True
    else:
        path = output
        check_output(path, force)
    missing = missing_modules("predict")
    if missing:
        notice(
            f"{missing[0]} is not installed, so the costs of kernels are not measured, which instr"
            f" predict needs: {how_to_install('predict')}"
        )
    with progress_bar("Measuring") as on_progress:
        measured = measure(on_progress)
    if not missing:
        from llamacpp_instr.prediction.recorded import measure_kernels

        with progress_bar("Recording random models") as on_progress:
            measured.kernel_model = measure_kernels(thread_counts(), on_progress)
    with open_output(path, force) as file:
        file.write(probe_json(measured))
    if path != "-":
        click.echo(render_text(probe_reports(measured)), nl=False)
        notice(f"wrote {path}")
