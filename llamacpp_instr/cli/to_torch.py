"""`instr to-torch`: Convert a log for TensorBoard and PyTorch's trace analysis."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import notice
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import LOGS, MAX_SIZE, Logs, SizeBound


@cli.command(
    "instr to-torch session.log -o profile", "instr to-torch server.log server.part2.log -o profile"
)
def to_torch(
    output: str = cli.DIRECTORY,
    steps: tuple[int, int] | None = cli.range_option("Only steps A to B, inclusive."),
    max_size: int = MAX_SIZE,
    logs: Logs = LOGS,
    force: bool = cli.REPLACE,
) -> None:
    """
    Writes a trace in the format of PyTorch's profiler, which TensorBoard's plugin torch-tb-profiler
    and Holistic Trace Analysis read, and an event file with the session's scalars: tokens per
    second, memory, the KV cache. Show both with `tensorboard --logdir DIR`. To these tools the
    kernels of the CPU are those of a GPU, because they analyse only those.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input, recorded with --level
    detailed or verbose. The parts of a rotated log are one session; DIR gets one session. It
    appears when its files are complete.
    """
    from llamacpp_instr.base.output import check_not_input, open_output_directory
    from llamacpp_instr.converters.exports.torch import NAMES, write_torch
    from llamacpp_instr.converters.exports.traced import Options
    from llamacpp_instr.log.graph.timeline import Selection

    need("torch")
    for name in NAMES:
        check_not_input(Path(output) / name, *logs.names)
    bound = SizeBound(max_size, whole=steps is None)
    with logs.converting(bound) as readers:
        if len(readers) > 1:
            raise UsageError(f"{len(readers)} sessions; a directory is for one")
        with open_output_directory(output, NAMES, force) as folder:
            options = Options(Selection(steps), lenient=logs.lenient)
            write_torch(readers[0], folder, options, bound.take)
    notice(f"{output}: {', '.join(NAMES)}")
