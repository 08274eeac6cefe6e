"""The figures of a session for Prometheus.

Names follow OpenTelemetry's semantic conventions for generative AI where they have one
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/), as Prometheus spells them:
underscores, and the unit at the end. Others begin with `llamacpp_instr_`. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llamacpp_instr.converters.live.frames import ended, figures_of

if TYPE_CHECKING:
    from llamacpp_instr.converters.live.state import LiveState

__all__ = ["CONTENT_TYPE", "metrics_text"]


def metrics_text(state: LiveState) -> bytes:
    """All figures of `state` in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(state))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, state: LiveState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for lane in ended(state):
            state.lanes.count(lane)
        for name, about, histogram in (
            ("gen_ai_server_time_to_first_token_seconds",
             "Of each request that has ended: from its arrival, or the start of its first step, to"
             " its first token.", state.lanes.to_first),
            ("gen_ai_server_time_per_output_token_seconds",
             "Of each request that has ended: the time after its first token, divided by the tokens"
             " after it.", state.lanes.per_token),
            ("llamacpp_instr_time_between_tokens_seconds",
             "From each token of a request to the next.", state.lanes.gaps),
        ):  # fmt: skip
            yield HistogramMetricFamily(name, about, histogram.cumulative(), histogram.sum)
        tokens = CounterMetricFamily(
            "llamacpp_instr_tokens",
            "Tokens of prompts that were computed, and tokens that were sampled.",
            labels=["gen_ai_token_type"],
        )
        tokens.add_metric(["input"], state.n_prompt)
        tokens.add_metric(["output"], state.n_tokens)
        yield tokens
        active = len(figures_of(state).active)
        for family, name, about, value in (
            (CounterMetricFamily, "requests", "Requests that began.", state.lanes.n_requests),
            (CounterMetricFamily, "steps", "Calls of llama_decode and llama_encode.",
             state.n_steps),
            (CounterMetricFamily, "failed_steps", "Calls that returned an error.", state.n_failed),
            (CounterMetricFamily, "busy_seconds", "Time inside these calls.", state.busy / 1e9),
            (CounterMetricFamily, "messages", "Warnings and errors of llama.cpp.",
             state.n_messages),
            (GaugeMetricFamily, "up", "Whether the session is still recorded.", not state.is_over),
            (GaugeMetricFamily, "active_requests", "Requests under way.", active),
        ):  # fmt: skip
            yield family(f"llamacpp_instr_{name}", about, value)
        if state.is_over:
            return  # the contexts are gone
        cells = GaugeMetricFamily(
            "llamacpp_instr_cache_cells", "Cells of the KV cache.", labels=["ctx", "cache", "state"]
        )
        for (ctx, cache), of in state.caches.items():
            cells.add_metric([str(ctx), str(cache), "used"], of.used)
            cells.add_metric([str(ctx), str(cache), "free"], of.size - of.used)
        yield cells
        memory = GaugeMetricFamily(
            "llamacpp_instr_memory_bytes", "Memory that contexts hold.", labels=["ctx", "kind"]
        )
        for ctx, event in state.memory.items():
            for kind in ("model", "context", "compute"):
                used = sum(getattr(buffer, kind) for buffer in event.buffers)
                memory.add_metric([str(ctx), kind], used)
        yield memory
