"""The kernels of a plan as events of PyTorch's profiler, with places for the numbers of a compute.

Each kernel is three events: the operator (`cpu_op`), its launch, and the kernel on a stream. The
tools join them by `External id` and `correlation`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.schema import Graph, Plan

Int64 = NDArray[np.int64]
SEPARATOR = b",\n"
LAUNCH = "cudaLaunchKernel"
"""the only name of a launch that the tools know"""
DEVICE = 0


class KernelText:
    """The events of a plan's kernels, built once and filled in for each compute."""

    def __init__(self, graph: Graph, plan: Plan, pid: int, ctx: int) -> None:
        timeline = plan_timeline(graph, plan)
        nodes = graph.whole
        parts = []
        on = b'"pid":%d,"tid":%d' % (pid, ctx)
        stream = b'"pid":%d,"tid":%d' % (DEVICE, ctx)
        times = b',"ts":%d.%03d,"dur":%d.%03d'
        for i, (first, op) in enumerate(zip(plan.node, timeline.ops, strict=True)):
            sources = [tensor(graph, source) for source in nodes.src[first]]
            # PyTorch's shapes begin with the slowest dimension
            dims = [list(reversed(of.ne)) for of in sources]
            args: dict[str, Any] = {
                "Input Dims": dims,
                "Input type": [of.type for of in sources],
                "node": nodes.name[first],
                "layer": op.layer,
                "block": op.block,
            }
            label = timeline.kernels.label[i]
            name = _text(label)
            parts += [
                b'{"ph":"X","cat":"cpu_op","name":%s,' % name + on + times,
                b',"args":{"External id":%d,' + _text(args)[1:] + b"}",
                SEPARATOR,
                b'{"ph":"X","cat":"Runtime","name":"%s",' % LAUNCH.encode() + on,
                b',"ts":%d.%03d,"dur":0.000,"args":{"External id":%d,"correlation":%d}}',
                SEPARATOR,
                b'{"ph":"X","cat":"kernel","name":%s,' % name + stream + times,
                b',"args":{"External id":%%d,"correlation":%%d,"device":%d,' % DEVICE,
                b'"context":%d,"stream":%d}}' % (ctx, ctx),
                SEPARATOR,
            ]
        self.n = len(timeline.ops)
        self._text = b"".join(parts[:-1])

    def fill(self, begin: Int64, dur: Int64, first_id: int) -> bytes:
        """The events of a compute, without a separator around them; times in ns. Their ids count
        from `first_id`."""
        ids = np.arange(first_id, first_id + self.n)[:, None]
        times = np.stack(np.divmod(np.column_stack((begin, dur)), 1000), axis=2).reshape(-1, 4)
        numbers = np.hstack((times, ids, times[:, :2], ids, ids, times, ids, ids))
        return self._text % tuple(numbers.ravel().tolist())


def _text(value: Any) -> bytes:
    """JSON whose percent signs are those of a template."""
    return orjson.dumps(value).replace(b"%", b"%%")
