"""Runs `instr probe --device Vulkan0`, which measures little here, so that it ends soon.

    probe_device.py OPTION ...

First prints the description of the device, and the bytes per second of copies between two tensors,
timed here by the clock of this process around a graph of copies: no code of the product times them.
"""

from __future__ import annotations

import json
import sys
import time

from llamacpp_instr import cli
from llamacpp_instr.llama import native
from llamacpp_instr.llama.devices import device_named
from llamacpp_instr.prediction.probe import device as probe

# of large graphs, Mesa 22.3 damages the memory of the process: tests/programs/lavapipe.py
COPIES, MIB = 16, 1 << 20
probe.SECONDS, probe.TOKENS, probe.ROWS, probe.MOST_OPS = 0.0, (1, 8), (256,), COPIES
probe.measure_device.__defaults__ = ("F32", "F16"), (1, 16)


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


def main() -> None:
    native.load()
    device = device_named("Vulkan0")
    found = {"description": device.description, "copied": copied(device.handle)}
    print(json.dumps(found), flush=True)
    sys.argv[:1] = ["instr", "probe", "--device", "Vulkan0"]
    cli.main()


if __name__ == "__main__":
    main()
