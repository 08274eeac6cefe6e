"""Speed and memory of converting a log to a Perfetto trace.

    python -m benchmarks.convert [--level detailed] [--large-mib 1024]

Records sessions of the demo model (4 layers, 73 op slices per decode) and of a random one (14
layers, 243), and extends the logs by repeating their decodes. In one run, in turns, it measures CPU
seconds of this process for

    ours    from the NDJSON file to the complete trace: reading, all tracks, counters
    peer    the perfetto package's StreamingTraceProtoBuilder with the same op slices and
            annotations, ready as Python values: no reading, nothing but ops
    reading decoding the log's events, without using them

and the peak memory of another process that converts a large log. Traces go to /dev/null.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from benchmarks.long_log import write_long_log
from benchmarks.ratios import median_ratio
from benchmarks.shaped_model import LLAMA_100M, write_model
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import Graph, Ops, Plan

PAIRS = 7
PEER_COMPUTES = 40
CONVERT = """
import resource, sys
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.reader import read_events
with open("/dev/null", "wb") as out:
    written = write_perfetto(read_events(sys.argv[1]), out, Options())
usage = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss would count what the parent had when it forked
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, usage.ru_utime + usage.ru_stime, written.bytes)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--level", default="detailed", choices=("detailed", "verbose"))
    parser.add_argument("--mib", type=int, default=8, help="size of the log that is timed")
    parser.add_argument("--large-mib", type=int, default=1024, help="size of the log for memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo, other = folder / "demo.log", folder / "random.log"
        run = f"-m llamacpp_instr run demo -p Once -n 32 --level {args.level} --log {demo}"
        model = write_model(folder / "random.gguf", LLAMA_100M)
        probe = f"tests/kit/probe.py {model} {folder}/out.npz --threads 2 --level {args.level}"
        for command in (run, f"{probe} --decodes 16 --log {other}"):
            subprocess.run([sys.executable, *command.split()], check=True, capture_output=True)
        for real in (demo, other):
            print(f"\n{real.stem} model, level {args.level}")
            compare(real, folder / "long.log", args.mib << 20)
        print()
        large(demo, folder / "large.log", args.large_mib << 20)


def compare(real: Path, log: Path, n_bytes: int) -> None:
    n_ops = write_long_log(real, log, n_bytes)
    slices = peer_slices(log)
    ours, peer, reading = list[float](), list[float](), list[float]()
    for _ in range(PAIRS):
        ours.append(cpu(convert, log) / n_ops)
        peer.append(cpu(build, slices) / len(slices))
        reading.append(cpu(read, log) / n_ops)
    speed = median_ratio([1e-6] * PAIRS, ours)
    print(f"{n_ops:,} op slices from a log of {log.stat().st_size >> 20} MiB, begin to end")
    print(f"million op slices a CPU second:   {speed}")
    print(f"times the package's builder:      {median_ratio(peer, ours)}")
    print(f"share of decoding the log's JSON: {median_ratio(reading, ours)}")


def large(real: Path, log: Path, n_bytes: int) -> None:
    n_ops = write_long_log(real, log, n_bytes)
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(log)], check=True, capture_output=True, text=True
    )
    peak, seconds, size = done.stdout.split()
    print(f"a log of {log.stat().st_size / 1e9:.2f} GB: peak memory {int(peak) / 1e6:.0f} MB,")
    print(f"  {n_ops:,} op slices in {float(seconds):.1f} CPU s, trace {int(size) / 1e9:.2f} GB")


def cpu(function: Any, argument: Any) -> float:
    """CPU seconds of a call, from start to end of this process's only thread."""
    begin = time.process_time()
    function(argument)
    return time.process_time() - begin


def convert(log: Path) -> None:
    with Path("/dev/null").open("wb") as out:
        write_perfetto(read_events(log), out, Options())


def read(log: Path) -> None:
    for _ in read_events(log):
        pass


def peer_slices(log: Path) -> list[tuple[int, int, str, dict[str, str | int | float]]]:
    """Begin, end, name and annotations of the op slices of some computes."""
    graphs: dict[int, Graph] = {}
    plans: dict[int, Plan] = {}
    slices = []
    n = 0
    for _, event in read_events(log):
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
                rates = {"GB/s": op.bytes / max(dur, 1), "GFLOP/s": op.flops / max(dur, 1)}
                work = {"GB/s": op.bytes, "GFLOP/s": op.flops}
                args = {**op.args, **{name: r for name, r in rates.items() if work[name]}}
                slices.append((now + gap, now + gap + dur, op.title, args))
                now += gap + dur
            if n == PEER_COMPUTES:
                break
    return slices


def build(slices: list[tuple[int, int, str, dict[str, str | int | float]]]) -> None:
    with Path("/dev/null").open("wb") as out:
        builder = StreamingTraceProtoBuilder(out)
        packet = builder.create_packet()
        packet.track_descriptor.uuid = 1
        packet.track_descriptor.name = "layers"
        builder.write_packet(packet)
        for begin, end, name, args in slices:
            packet = builder.create_packet()
            packet.timestamp = begin
            packet.trusted_packet_sequence_id = 1
            packet.track_event.type = TrackEvent.TYPE_SLICE_BEGIN
            packet.track_event.track_uuid = 1
            packet.track_event.name = name
            for key, value in args.items():
                annotation = packet.track_event.debug_annotations.add()
                annotation.name = key
                if isinstance(value, str):
                    annotation.string_value = value
                elif isinstance(value, int):
                    annotation.int_value = value
                else:
                    annotation.double_value = value
            builder.write_packet(packet)
            packet = builder.create_packet()
            packet.timestamp = end
            packet.trusted_packet_sequence_id = 1
            packet.track_event.type = TrackEvent.TYPE_SLICE_END
            packet.track_event.track_uuid = 1
            builder.write_packet(packet)


if __name__ == "__main__":
    main()
