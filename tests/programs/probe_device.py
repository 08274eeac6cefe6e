"""Adds what little of a Vulkan device can be measured soon to the file of a probe.

    probe_device.py FILE

Prints the description of the device, and the bytes per second of copies between two tensors, timed
here by the clock of this process around a graph of 64 copies: no code of the product times them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from llamacpp_instr.llama import native
from llamacpp_instr.llama.devices import device_named
from llamacpp_instr.prediction.probe import device as probe
from llamacpp_instr.prediction.probe.file import probe_json, read_probe

COPIES, MIB = 64, 1 << 20


def copied(of: int) -> float:
    backend = probe._backend().ggml_backend_dev_init(of, None)
    with probe.DeviceGraph(of, backend) as graph:
        one, other = (graph.filled(0, 1024, 2048) for _ in range(2))
        for _ in range(COPIES):
            graph.node("ggml_cpy", one, other)
        assert graph.allocate()
        graph.compute()
        times = []
        for _ in range(5):
            begin = time.monotonic_ns()
            graph.compute()
            times.append(time.monotonic_ns() - begin)
    probe._backend().ggml_backend_free(backend)
    return COPIES * 2 * 8 * MIB / min(times) * 1e9


def main(path: Path) -> None:
    native.load()
    device = device_named("Vulkan0")
    probe.SECONDS, probe.TOKENS, probe.ROWS = 0.0, (1, 8), (256,)
    # Mesa 22.3 damages the heap of a process after graphs with hundreds of small products
    probe.MOST_OPS = 16
    limits = probe.measure_device(device, lambda *_: None, types=("F32", "F16"), sizes=(1, 16))
    path.write_bytes(probe_json(read_probe(path).with_device(limits)))
    print(json.dumps({"description": device.description, "copied": copied(device.handle)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
