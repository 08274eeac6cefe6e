// llama-instrumentation-kernels.cpp - what a compute left in the sink: layers, ops, splits
//
// The order in which the kernels of a graph run is written once per distinct order; after that a compute
// costs a number or two per kernel.

#include "llama-instrumentation-session.h"

#include <algorithm>

namespace llama_instr {

namespace {

// the order in which the sink says that the kernels ran: the one written before, or a new one
const plan_state & plan_of(session & s, graph_state & graph, const ggml_instr_thread & th) {
    const auto same = [&th](const plan_state & plan) {
        if (plan.node.size() != (size_t) th.n) {
            return false;
        }
        for (int32_t i = 0; i < th.n; i++) {
            if (plan.node[(size_t) i] != th.ops[i].node || plan.n[(size_t) i] != th.ops[i].n) {
                return false;
            }
        }
        return true;
    };
    for (const auto & plan : graph.plans) {
        if (same(plan)) {
            return plan;
        }
    }
    plan_state plan;
    plan.id = s.next_plan++;
    bool fused = false;
    for (int32_t i = 0; i < th.n; i++) {
        plan.node.push_back(th.ops[i].node);
        plan.n.push_back(th.ops[i].n);
        fused = fused || th.ops[i].n != 1;
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_PLAN, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_PLAN, plan.id).kv(LLAMA_INSTR_K_GRAPH, graph.id);
    line.column(LLAMA_INSTR_K_NODE, plan.node.size(), [&](size_t i) { return plan.node[i]; });
    if (fused) {
        line.column(LLAMA_INSTR_K_N, plan.n.size(), [&](size_t i) { return plan.n[i]; });
    }
    s.write(LLAMA_INSTR_EV_PLAN, line);
    graph.plans.push_back(std::move(plan));
    return graph.plans.back();
}

// intervals as a begin and two columns: the gap before each (none before the first), and its duration
struct intervals {
    uint64_t begin_ns = 0;
    std::vector<uint64_t> gap, dur;
    uint64_t sum_of_gaps = 0;

    // room for `n`; what was added before is forgotten
    void reset(size_t n) {
        if (gap.size() < n) {
            gap.resize(n);
            dur.resize(n);
        }
        count       = 0;
        sum_of_gaps = 0;
    }

    void add(uint64_t begin, uint64_t end) {
        if (count == 0) {
            begin_ns = at = begin;
        }
        // two cores' counters may disagree by some ticks: time does not run backwards here
        begin = std::max(begin, at);
        end   = std::max(end, begin);
        gap[count] = begin - at;
        dur[count] = end - begin;
        sum_of_gaps += begin - at;
        count++;
        at = end;
    }

    // nanoseconds from the end of the last interval to `ns`
    uint64_t until(uint64_t ns) const { return ns > at ? ns - at : 0; }

    void write(json_line & line) const {
        if (sum_of_gaps > 0) {
            line.column(LLAMA_INSTR_K_GAP, count, [this](size_t i) { return gap[i]; });
        }
        line.column(LLAMA_INSTR_K_DUR, count, [this](size_t i) { return dur[i]; });
    }

  private:
    size_t   count = 0;
    uint64_t at    = 0;
};

// Counter ticks become nanoseconds by the line through the compute's two ends, at which both clocks were
// read: no calibration that could drift.
struct tick_scale {
    uint64_t begin_ns;
    uint64_t begin_ticks;
    double   ns_per_tick;

    explicit tick_scale(const compute_times & times) : begin_ns(times.begin_ns), begin_ticks(times.begin_ticks) {
        const uint64_t ticks = times.end_ticks - times.begin_ticks;
        ns_per_tick = ticks > 0 ? (double) (times.end_ns - times.begin_ns) / (double) ticks : 0.0;
    }

    uint64_t ns(uint64_t ticks) const { return begin_ns + (ticks > begin_ticks ? duration(ticks - begin_ticks) : 0); }

    // through signed integers, which the CPU converts in one instruction
    uint64_t duration(uint64_t ticks) const { return (uint64_t) (int64_t) ((double) (int64_t) ticks * ns_per_tick + 0.5); }
};

// runs of consecutive kernels of one layer; their gaps inside a run belong to it
void write_layers(session & s, const graph_state & graph, const ggml_instr_thread & th, const tick_scale & scale, const compute_times & times) {
    thread_local std::vector<int32_t> layer;
    thread_local intervals spans;
    layer.clear();
    spans.reset((size_t) th.n);
    for (int32_t i = 0; i < th.n;) {
        const int32_t current = graph.layers[(size_t) th.ops[i].node];
        int32_t last = i;
        while (last + 1 < th.n && graph.layers[(size_t) th.ops[last + 1].node] == current) {
            last++;
        }
        layer.push_back(current);
        spans.add(scale.ns(th.ops[i].begin), scale.ns(th.ops[last].end));
        i = last + 1;
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_LAYERS, spans.begin_ns);
    line.kv(LLAMA_INSTR_K_COMPUTE, times.compute);
    line.column(LLAMA_INSTR_K_LAYER, layer.size(), [&](size_t i) { return layer[i]; });
    spans.write(line);
    s.write(LLAMA_INSTR_EV_LAYERS, line);
}

void write_ops(session & s, int thread, int plan, const ggml_instr_thread & th, const tick_scale & scale, const compute_times & times) {
    thread_local intervals spans;
    spans.reset((size_t) th.n);
    for (int32_t i = 0; i < th.n; i++) {
        spans.add(scale.ns(th.ops[i].begin), scale.ns(th.ops[i].end));
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_OPS, spans.begin_ns);
    line.kv(LLAMA_INSTR_K_COMPUTE, times.compute).kv(LLAMA_INSTR_K_PLAN, plan);
    if (thread != 0) {
        line.kv(LLAMA_INSTR_K_THREAD, thread);
    }
    spans.write(line);
    if (s.detail == level::verbose) {
        line.column(LLAMA_INSTR_K_WAIT, (size_t) th.n, [&](size_t i) {
            return std::min(scale.duration(th.ops[i].wait), spans.dur[i]);
        });
    }
    if (const uint64_t tail = spans.until(scale.ns(th.last))) {
        line.kv(LLAMA_INSTR_K_TAIL, tail);
    }
    s.write(LLAMA_INSTR_EV_OPS, line);
}

void write_split_times(session & s, const ggml_instr_sink & sink, const tick_scale & scale, const compute_times & times) {
    intervals spans;
    spans.reset((size_t) sink.n_splits);
    for (int32_t i = 0; i < sink.n_splits; i++) {
        spans.add(scale.ns(sink.splits[i].begin), scale.ns(sink.splits[i].end));
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_SPLITS, spans.begin_ns);
    line.kv(LLAMA_INSTR_K_COMPUTE, times.compute);
    line.column(LLAMA_INSTR_K_SPLIT, (size_t) sink.n_splits, [&](size_t i) { return sink.splits[i].split; });
    spans.write(line);
    line.column(LLAMA_INSTR_K_ASYNCHRONOUS, (size_t) sink.n_splits, [&](size_t i) { return sink.splits[i].asynchronous ? 1 : 0; });
    s.write(LLAMA_INSTR_EV_SPLITS, line);
}

}  // namespace

void write_kernels(session & s, context_state & state, graph_state & graph, const compute_times & times) {
    const ggml_instr_sink & sink = state.sink;
    const tick_scale scale(times);
    for (int32_t i = 0; i < sink.n_threads; i++) {
        const ggml_instr_thread & th = sink.threads[i];
        s.dropped_ops += (uint64_t) th.dropped;
        if (th.n == 0) {
            continue;
        }
        if (i == 0) {
            const int plan = s.detail == level::minimal ? -1 : plan_of(s, graph, th).id;
            write_layers(s, graph, th, scale, times);
            if (plan >= 0) {
                write_ops(s, i, plan, th, scale, times);
            }
        } else {
            write_ops(s, i, plan_of(s, graph, th).id, th, scale, times);
        }
    }
    if (graph.splits_matter && sink.n_splits > 0) {
        write_split_times(s, sink, scale, times);
    }
}

}  // namespace llama_instr
