"""Speed and memory of converting a log to a Perfetto trace.

    python -m benchmarks.convert [--level detailed] [--mib 8] [--large-mib 1024]

Records sessions of the demo model (4 layers, 73 op slices per decode) and of a random one (12
layers, 209), and extends the logs by repeating their decodes to `--mib`; and 20 short runs of the
demo model, whose log is not extended. In one run, interleaved, it measures CPU seconds of this
process for

    ours    from the NDJSON file to the complete trace: reading, all tracks, counters
    peer    the perfetto package's StreamingTraceProtoBuilder with the same op slices and
            annotations, ready as Python values: no reading, nothing but ops
    reading decoding the log's events, without using them

and the peak memory of another process that converts a large log. Traces go to /dev/null.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from benchmarks.harness import (
    MODEL_100M,
    arguments,
    cost_of_instr,
    cpu_in_turns,
    median_ratio,
    record_demo,
    scratch,
    write_long_log,
)
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.reader import LogReader, read_events
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.schema import Graph, Ops, Plan
from llamacpp_instr.prediction.recorded import write_random_layers
from tests.kit.native_kit import run_probe

PAIRS = 7
PEER_COMPUTES = 40

Slice: TypeAlias = "tuple[int, int, str, dict[str, str | int | float]]"
"""begin, end, name and annotations"""


def main() -> None:
    args = arguments(__doc__, level=("detailed", "verbose"), mib=8, large_mib=1024)
    with scratch() as folder:
        demo, other, long = (folder / f"{of}.log" for of in ("demo", "random", "long"))
        record_demo(demo, 32, "--level", args.level)
        model = write_random_layers(folder / "random.gguf", *MODEL_100M)
        options = f"--threads 2 --level {args.level} --decodes 16 --log {other}"
        run_probe(folder / "out.npz", model, *options.split())
        for real in (demo, other):
            print(f"\n{real.stem} model, level {args.level}")
            write_long_log(real, long, args.mib << 20)
            compare(long)
        short = folder / "short.log"
        record_demo(short, 135, "--level", args.level, "--repeat", 20)
        print(f"\n20 short runs of the demo model, level {args.level}")
        compare(short)
        n_ops, _ = write_long_log(demo, long, args.large_mib << 20)
        trace = folder / "large.pftrace"
        seconds, peak = cost_of_instr("to-perfetto", long, "-o", trace, "--max-size", "100GB")
        print(f"\na log of {long.stat().st_size / 1e9:.2f} GB: peak memory {peak / 1e6:.0f} MB,")
        size = trace.stat().st_size / 1e9
        print(f"  {n_ops:,} op slices in {seconds:.1f} CPU s, trace {size:.2f} GB")


def compare(log: Path) -> None:
    events = (event for _, event in read_events(log))
    n_ops = sum(len(of.dur) for of in events if isinstance(of, Ops) and of.thread == 0)
    slices = peer_slices(log)
    seconds = cpu_in_turns(
        PAIRS,
        ours=partial(convert, log),
        peer=partial(build, slices),
        reading=lambda: deque(read_events(log), maxlen=0),
    )
    ours, reading = seconds["ours"] / n_ops, seconds["reading"] / n_ops
    print(f"{n_ops:,} op slices from a log of {log.stat().st_size >> 20} MiB, start to end")
    print(f"million op slices a CPU second:   {median_ratio([1e-6] * PAIRS, ours)}")
    peer = seconds["peer"] / len(slices)
    print(f"times the package's builder:      {median_ratio(peer, ours)}")
    print(f"share of decoding the log's JSON: {median_ratio(reading, ours)}")


def convert(log: Path) -> None:
    with Path("/dev/null").open("wb") as out:
        write_perfetto(read_events(log), out, Options())


def peer_slices(log: Path) -> list[Slice]:
    """The op slices of some computes."""
    graphs: dict[int, Graph] = {}
    plans: dict[int, Plan] = {}
    slices: list[Slice] = []
    n = 0
    for _, event in Resolver().follow(LogReader(log)):
        if isinstance(event, Graph):
            graphs[event.graph] = event
        elif isinstance(event, Plan):
            plans[event.plan] = event
        elif isinstance(event, Ops) and event.thread == 0:
            n += 1
            plan = plans[event.plan]
            now = event.t
            ops = plan_timeline(graphs[plan.graph], plan).ops
            for op, gap, dur in zip(ops, event.gap or [0] * len(ops), event.dur, strict=True):
                work = {"GB/s": op.bytes, "GFLOP/s": op.flops}
                rates = {name: amount / max(dur, 1) for name, amount in work.items() if amount}
                slices.append((now + gap, now + gap + dur, op.title, {**op.args, **rates}))
                now += gap + dur
            if n == PEER_COMPUTES:
                break
    return slices


def build(slices: list[Slice]) -> None:
    with Path("/dev/null").open("wb") as out:
        builder = StreamingTraceProtoBuilder(out)
        packet = builder.create_packet()
        packet.track_descriptor.uuid = 1
        packet.track_descriptor.name = "layers"
        builder.write_packet(packet)

        def write(t: int, kind: Any, name: str = "", args: dict[str, Any] | None = None) -> None:
            packet = builder.create_packet()
            packet.timestamp = t
            packet.trusted_packet_sequence_id = 1
            packet.track_event.type = kind
            packet.track_event.track_uuid = 1
            if name:
                packet.track_event.name = name
            for key, value in (args or {}).items():
                annotation = packet.track_event.debug_annotations.add()
                annotation.name = key
                if isinstance(value, str):
                    annotation.string_value = value
                elif isinstance(value, int):
                    annotation.int_value = value
                else:
                    annotation.double_value = value
            builder.write_packet(packet)

        for begin, end, name, args in slices:
            write(begin, TrackEvent.TYPE_SLICE_BEGIN, name, args)
            write(end, TrackEvent.TYPE_SLICE_END)


if __name__ == "__main__":
    main()
