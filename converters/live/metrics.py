"""All figures of a live session in Prometheus's text format, times in seconds.

Names and labels follow OpenTelemetry's semantic conventions for generative AI where they have one
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/), as Prometheus spells them:
underscores, and the unit at the end. Others begin with `llamacpp_instr_`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llamacpp_instr.converters.live.frames import ended, figures_of, is_active
from llamacpp_instr.converters.live.state import LiveState
from llamacpp_instr.log.requests import COPY_OPS

PROVIDER = "llama.cpp"
MODEL, OPERATION, ERROR = "gen_ai_request_model", "gen_ai_operation_name", "error_type"


def metrics_text(state: LiveState) -> bytes:
    """The metrics of `state`."""
    return generate_latest(_Figures(state))


class _Figures(Collector):
    def __init__(self, state: LiveState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for lane in ended(state):
            state.lanes.count(lane)
        yield from self._times()
        tokens = CounterMetricFamily(
            "llamacpp_instr_tokens",
            "Tokens of prompts that were computed or found in the cache, and generated ones.",
            labels=[MODEL, "kind"],
        )
        for labels, n in state.tokens.items():
            tokens.add_metric(labels, n)
        yield tokens
        for family, name, about, value in (
            (CounterMetricFamily, "requests", "Requests that arrived.", state.n_requests),
            (CounterMetricFamily, "steps", "Calls of llama_decode and llama_encode.",
             state.n_steps),
            (CounterMetricFamily, "failed_steps", "Calls that returned an error.", state.n_failed),
            (CounterMetricFamily, "busy_seconds", "Time inside these calls.", state.busy / 1e9),
            (CounterMetricFamily, "messages", "Warnings and errors of llama.cpp.",
             state.n_messages),
            (GaugeMetricFamily, "up", "Whether the session is still recorded.", not state.is_over),
        ):  # fmt: skip
            yield family(f"llamacpp_instr_{name}", about, value)
        if state.copies is not None:
            about = "Prompts that moved from a slot to a copy in RAM (save), or back (load)."
            moves = CounterMetricFamily("llamacpp_instr_prompt_moves", about, labels=["move"])
            for op in COPY_OPS:
                moves.add_metric([op], state.copy_moves[op])
            yield moves
        devices = CounterMetricFamily(
            "llamacpp_instr_device_seconds", "Time of the kernels of devices.", labels=["device"]
        )
        for device, ns in state.devices.items():
            devices.add_metric([device], ns / 1e9)
        yield devices
        in_use = state.in_use
        memory = GaugeMetricFamily(
            "llamacpp_instr_device_memory_bytes",
            "Memory of devices: what contexts hold, and what a driver last reported as free.",
            labels=["device", "state"],
        )
        for device, has in in_use.devices.items():
            held = in_use.on_devices[device]
            for what, n in (("held", held), ("free", has.free), ("total", has.total)):
                memory.add_metric([device, what], n)
        yield memory
        figures = figures_of(state)
        active = {"running": len(figures.active), "queued": figures.queued}
        yield self._by_state("active_requests", "Requests under way.", active)
        if state.start is not None:
            of = state.start.producer
            build = {"version": of.llama_cpp, "commit": of.commit, "patches": of.patches}
            yield InfoMetricFamily("llamacpp_instr_build", "Who wrote the log.", build)
        if not state.is_over:  # else the contexts are gone
            yield from self._contexts()

    def _times(self) -> Iterator[Metric]:
        """The histograms."""
        times = self._state.lanes.times
        for name, about, histograms in (
            ("gen_ai_server_request_duration",
             "From the arrival of a request, or its first step, to its end.", times.duration),
            ("gen_ai_server_time_to_first_token",
             "From the arrival of a request, or its first step, to its first token.",
             times.to_first),
            ("gen_ai_server_time_per_output_token",
             "The time after the first token of a request, divided by the tokens after it.",
             times.per_token),
            ("llamacpp_instr_time_in_queue",
             "From the arrival of a request to its first step.", times.queue),
            ("llamacpp_instr_time_between_tokens",
             "From each token of a request to the next.", times.between),
        ):  # fmt: skip
            labels = ["gen_ai_provider_name", MODEL]
            if histograms is not times.between:
                labels.append(OPERATION)
            if histograms is times.duration:
                labels.append(ERROR)
            family = HistogramMetricFamily(f"{name}_seconds", about, labels=labels)
            for values, of in histograms:
                family.add_metric([PROVIDER, *values], of.cumulative(), of.sum)
            yield family

    def _contexts(self) -> Iterator[Metric]:
        """What the contexts hold."""
        state = self._state
        if (server := state.server) is not None:
            lanes = (lane for lane in state.lanes if lane.request.ctx in (-1, server.ctx))
            used = sum(is_active(lane, state.now) for lane in lanes)
            slots = {"used": used, "free": max(server.n_seq_max - used, 0)}
            about = "Sequences of the latest context, with and without a request."
            yield self._by_state("slots", about, slots)
        if state.held:
            held = GaugeMetricFamily(
                "llamacpp_instr_slot_tokens",
                "Tokens that a slot has in the cache.",
                labels=["slot"],
            )
            for slot, n in sorted(state.held.items()):
                held.add_metric([str(slot)], n)
            yield held
        if (copies := state.copies) is not None:
            about = "Memory of a server's copies of prompts in RAM."
            yield GaugeMetricFamily("llamacpp_instr_prompt_copies_bytes", about, copies.held)
            about = "Copies of prompts in RAM."
            yield GaugeMetricFamily("llamacpp_instr_prompt_copies", about, copies.copies)
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
                amount = sum(getattr(buffer, kind) for buffer in event.buffers)
                memory.add_metric([str(ctx), kind], amount)
        yield memory

    def _by_state(self, name: str, about: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(f"llamacpp_instr_{name}", about, labels=["state"])
        for state, value in values.items():
            family.add_metric([state], value)
        return family
