"""Makes the pictures of docs/how-to/schedule-what-if.md: a block of Llama-3.2-1B on 4 engines.

    python -m benchmarks.schedule_pictures [--type Q8_0] [--runs 61]

Records a model with random weights of that shape (hidden size 2048, 32 heads of 64, 8 heads of keys
and values), whose decode sees 4 past tokens. The same tasks are scheduled on one engine, on four,
and on four with a part for each head; the times are measured. Each run decodes the fifth token
once. Prints the makespans. Run it on an idle machine.
"""

from __future__ import annotations

from benchmarks.harness import ROOT, arguments, scratch
from llamacpp_instr.converters.scheduling.report import gantt_chart
from llamacpp_instr.converters.scheduling.schedule import schedule_list
from llamacpp_instr.converters.scheduling.sources import recorded_graph
from llamacpp_instr.converters.scheduling.split import Split, divide, part_shapes
from llamacpp_instr.converters.scheduling.tasks import equal_engines
from llamacpp_instr.log.session import load_session
from llamacpp_instr.prediction.probe.measure import time_parts
from llamacpp_instr.prediction.recorded import Run, Shape, record_runs, write_random_layers

PAST = 4
PICTURES: tuple[tuple[str, str, int, Split], ...] = (
    ("schedule-sequence", "One block on one engine", 1, "none"),
    ("schedule-parallel", "One block on four engines", 4, "none"),
    ("schedule-heads", "One block on four engines, a part for each head", 4, "heads"),
)


def main() -> None:
    chosen = arguments(__doc__, type=("Q8_0", "F16"), runs=61)
    with scratch() as folder:
        model, log = folder / "block.gguf", folder / "block.log"
        # the last block of a model also picks the rows that are wanted; the first does not
        write_random_layers(model, Shape(2048, 8192, 32, 8, 1024), [chosen.type] * 2)
        record_runs(model, log, 1, [Run(1, 1, past=PAST)] * chosen.runs)
        found = recorded_graph(load_session(log), layers=(0, 0))
    times = {kernel: time_parts(shape) for kernel, shape in part_shapes(found.timed).items()}
    print(*found.notes, sep="\n")
    for name, title, n, split in PICTURES:
        engines = equal_engines(n)
        divided = divide(found.timed, split, engines, times if split == "heads" else {})
        made = schedule_list(divided.tasks, engines)
        chart = gantt_chart(made, title)
        assert chart is not None
        (ROOT / "docs" / "images" / f"{name}.png").write_bytes(chart.png())
        print(f"{title}: {made.makespan / 1e6:.3f} ms", *divided.notes)


if __name__ == "__main__":
    main()
