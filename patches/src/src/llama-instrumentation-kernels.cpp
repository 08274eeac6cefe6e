// llama-instrumentation-kernels.cpp - what a compute left in the sink: layers, ops, splits
//
// The order in which the kernels of a graph run is written once per distinct order; after that a compute
// costs a number or two per kernel. What most computes do without is kept out of the others' way: code that runs
// once a decode comes from memory, line by line.

#include "llama-instrumentation-session.h"

#include <algorithm>
#include <cstring>

namespace llama_instr {

namespace {

int32_t first_node(uint64_t nodes) { return (int32_t) (nodes >> 32); }
int32_t n_nodes(uint64_t nodes)    { return (int32_t) (uint32_t) nodes; }

// the order in which the sink says that the kernels ran: one written before, nullptr when there is none
[[gnu::noinline]] const plan_state * known_plan(const graph_state & graph, const ggml_instr_thread & th) {
    const size_t n = (size_t) th.n;
    for (const auto & plan : graph.plans) {
        if (plan.nodes.size() == n && memcmp(plan.nodes.data(), th.nodes, n * sizeof(th.nodes[0])) == 0) {
            return &plan;
        }
    }
    return nullptr;
}

[[gnu::cold, gnu::noinline]] const plan_state & new_plan(session & s, graph_state & graph, const ggml_instr_thread & th) {
    const size_t n = (size_t) th.n;
    graph.plans.emplace_back();
    plan_state & plan = graph.plans.back();
    plan.nodes.assign(th.nodes, th.nodes + n);
    bool fused = false;
    for (int32_t i = 0; i < th.n; i++) {
        const int32_t layer = graph.layers[(size_t) first_node(plan.nodes[(size_t) i])];
        if (i == 0 || layer != plan.runs.back().layer) {
            plan.runs.push_back({ layer, i, i });
        }
        plan.runs.back().last = i;
        fused = fused || n_nodes(plan.nodes[(size_t) i]) != 1;
    }
    if (s.detail == level::minimal) {
        return plan;
    }
    plan.id = s.next_plan++;
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_PLAN, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_PLAN, plan.id).kv(LLAMA_INSTR_K_GRAPH, graph.id);
    line.column(LLAMA_INSTR_K_NODE, n, [&](size_t i) { return first_node(plan.nodes[i]); });
    if (fused) {
        line.column(LLAMA_INSTR_K_N, n, [&](size_t i) { return n_nodes(plan.nodes[i]); });
    }
    s.write(LLAMA_INSTR_EV_PLAN, line);
    return plan;
}

const plan_state & plan_of(session & s, graph_state & graph, int32_t thread, const ggml_instr_thread & th) {
    if (graph.last.size() <= (size_t) thread) {
        graph.last.resize((size_t) thread + 1);
    }
    last_plan & last = graph.last[(size_t) thread];
    if (!last.plan || last.version != th.version || last.plan->nodes.size() != (size_t) th.n) {
        const plan_state * known = known_plan(graph, th);
        last = { known ? known : &new_plan(s, graph, th), th.version };
    }
    return *last.plan;
}

// intervals as a begin and two columns: the gap before each (none before the first), and its duration
struct intervals {
    uint64_t   begin_ns = 0;
    uint64_t * gap;
    uint64_t * dur;
    uint64_t   any_gap = 0;

    // `columns` has room for twice `n` numbers
    intervals(uint64_t * columns, size_t n) : gap(columns), dur(columns + n) {}

    void add(uint64_t begin, uint64_t end) {
        if (count == 0) {
            begin_ns = at = begin;
        }
        // two cores' counters may disagree by some ticks: time does not run backwards here
        begin = std::max(begin, at);
        end   = std::max(end, begin);
        gap[count] = begin - at;
        dur[count] = end - begin;
        any_gap |= begin - at;
        count++;
        at = end;
    }

    void write(json_line & line) const {
        if (any_gap != 0) {
            line.column(LLAMA_INSTR_K_GAP, count, [this](size_t i) { return gap[i]; });
        }
        line.column(LLAMA_INSTR_K_DUR, count, [this](size_t i) { return dur[i]; });
    }

    size_t   count = 0;
    uint64_t at    = 0;  // the end of the last
};

// The intervals of kernels that took `dur` ticks, each `gap` ticks after the one before (nullptr: none), and
// their ends in nanoseconds since the compute began; the first begins `ticks` after that. `F` is a number
// in which all of them can be multiplied.
template <typename F, typename T>
void to_intervals(const tick_scale & scale, F ticks, size_t n, const T * gap, const T * dur, intervals & out, uint64_t * ends) {
    const auto ns = [&scale](F t) { return (uint64_t) ((t * scale.ns_per_tick + tick_scale::half) >> 32); };
    uint64_t at = ns(ticks), any_gap = 0;
    out.begin_ns = scale.begin_ns + at;
    if (gap) {
        for (size_t i = 0; i < n; i++) {
            ticks += gap[i];
            const uint64_t begin = ns(ticks);
            out.gap[i] = begin - at;
            any_gap |= begin - at;
            ticks += dur[i];
            at = ends[i] = ns(ticks);
            out.dur[i] = at - begin;
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            const uint64_t begin = at;
            ticks += dur[i];
            at = ends[i] = ns(ticks);
            out.dur[i] = at - begin;
        }
    }
    out.any_gap = any_gap;
    out.count   = n;
    out.at      = scale.begin_ns + at;
}

// The kernels of one thread in one compute, as short as they can be told: the ticks that each took, that
// passed before each (none before the first) and, at `verbose`, that each waited. The tail holds these
// columns, of 32 bits unless one of them needs 64.
struct alignas(8) kernels_record {
    const plan_state * plan;
    compute_times      times;
    uint64_t           begin;  // of the first
    uint64_t           last;   // when one more could have begun
    int32_t            thread;
    bool               wide, with_gap, with_wait, with_ops;

    void format(std::string_view tail, log_lines & lines) const {
        if (wide) {
            format_columns((const uint64_t *) tail.data(), lines);
        } else {
            format_columns((const uint32_t *) tail.data(), lines);
        }
    }

  private:
    template <typename T> void format_columns(const T * dur, log_lines & lines) const {
        const size_t n    = plan->nodes.size();
        const T *    gap  = with_gap ? dur + n : nullptr;
        const T *    wait = with_wait ? dur + (with_gap ? 2 : 1) * n : nullptr;
        const tick_scale scale(times.begin, times.end);
        uint64_t * const numbers = lines.scratch(5 * n);
        uint64_t * const ends    = numbers + 2 * n;
        intervals spans(numbers, n);
        const uint64_t first = scale.since_begin(begin);
        if (scale.is_short(scale.since_begin(last))) {
            to_intervals<uint64_t>(scale, first, n, gap, dur, spans, ends);
        } else {
            to_intervals<tick_scale::wide>(scale, first, n, gap, dur, spans, ends);
        }
        if (thread == 0) {
            format_layers(spans, ends, intervals(ends + n, n), lines);
        }
        if (with_ops) {
            format_ops(spans, wait, scale, lines);
        }
    }

    // the gaps inside a run belong to it
    void format_layers(const intervals & ops, const uint64_t * ends, intervals spans, log_lines & lines) const {
        const auto & runs = plan->runs;
        for (const auto & run : runs) {
            const uint64_t end_of_first = times.begin.ns + ends[(size_t) run.first];
            spans.add(end_of_first - ops.dur[(size_t) run.first], times.begin.ns + ends[(size_t) run.last]);
        }
        json_line & line = lines.begin(LLAMA_INSTR_EV_LAYERS, spans.begin_ns);
        line.kv(LLAMA_INSTR_K_COMPUTE, times.compute);
        line.column(LLAMA_INSTR_K_LAYER, runs.size(), [&](size_t i) { return runs[i].layer; });
        spans.write(line);
        line.end();
    }

    template <typename T> void format_ops(const intervals & spans, const T * wait, const tick_scale & scale, log_lines & lines) const {
        json_line & line = lines.begin(LLAMA_INSTR_EV_OPS, spans.begin_ns);
        line.kv(LLAMA_INSTR_K_COMPUTE, times.compute).kv(LLAMA_INSTR_K_PLAN, plan->id);
        if (thread != 0) {
            line.kv(LLAMA_INSTR_K_THREAD, thread);
        }
        spans.write(line);
        if (wait) {
            line.column(LLAMA_INSTR_K_WAIT, plan->nodes.size(), [&](size_t i) { return std::min(scale.duration(wait[i]), spans.dur[i]); });
        }
        if (const uint64_t returned = scale.ns(last); returned > spans.at) {
            line.kv(LLAMA_INSTR_K_TAIL, returned - spans.at);
        }
        line.end();
    }
};

// a column of 64-bit numbers, narrower if `T` is; returns the bits that were set in any of them
template <typename T, typename F> uint64_t fill_column(T * out, size_t n, F number) {
    uint64_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        const uint64_t v = number(i);
        out[i] = (T) v;
        bits |= v;
    }
    return bits;
}

// The columns of a record, at `dur`; returns their bytes, 0 when a number does not fit into 32 bits.
size_t fill_columns(kernels_record & record, const ggml_instr_thread & th, uint32_t * dur) {
    const size_t n = (size_t) th.n;
    uint32_t * const gap = dur + n;
    gap[0] = 0;
    const uint64_t dur_bits = fill_column(dur, n, [&](size_t i) { return th.end[i] - th.begin[i]; });
    const uint64_t gap_bits = fill_column(gap + 1, n - 1, [&](size_t i) { return th.begin[i + 1] - th.end[i]; });
    record.begin    = th.begin[0];
    record.with_gap = gap_bits != 0;
    uint32_t * end = record.with_gap ? gap + n : gap;
    uint64_t wait_bits = 0;
    if (record.with_wait) {
        wait_bits = fill_column(end, n, [&](size_t i) { return th.wait[i]; });
        end += n;
    }
    return (dur_bits | gap_bits | wait_bits) >> 32 == 0 ? (size_t) (end - dur) * sizeof(*dur) : 0;
}

// The same in 64 bits. Two cores' counters may disagree by some ticks, which looks like a number that does not
// fit: time does not run backwards here.
[[gnu::cold, gnu::noinline]] size_t fill_wide_columns(kernels_record & record, const ggml_instr_thread & th, uint64_t * dur) {
    const size_t n = (size_t) th.n;
    uint64_t at = th.begin[0];
    for (size_t i = 0; i < n; i++) {
        const uint64_t begin = std::max(th.begin[i], at);
        const uint64_t end   = std::max(th.end[i], begin);
        dur[i]     = end - begin;
        dur[n + i] = begin - at;
        if (record.with_wait) {
            dur[2 * n + i] = th.wait[i];
        }
        at = end;
    }
    record.wide     = true;
    record.begin    = th.begin[0];
    record.last     = std::max(record.last, at);
    record.with_gap = true;
    return (record.with_wait ? 3 : 2) * n * sizeof(*dur);
}

void write_thread(session & s, graph_state & graph, int32_t thread, const ggml_instr_thread & th, const compute_times & times) {
    kernels_record record = {};
    record.plan      = &plan_of(s, graph, thread, th);
    record.times     = times;
    record.last      = th.last;
    record.thread    = thread;
    record.with_ops  = s.detail != level::minimal;
    record.with_wait = s.detail == level::verbose;
    s.add(record, 3 * (size_t) th.n * sizeof(uint64_t), [&](char * tail) {
        const size_t narrow = fill_columns(record, th, (uint32_t *) tail);
        return narrow > 0 ? narrow : fill_wide_columns(record, th, (uint64_t *) tail);
    });
}

[[gnu::noinline]] void write_split_times(session & s, const ggml_instr_sink & sink, const tick_scale & scale, const compute_times & times) {
    std::vector<uint64_t> columns(2 * (size_t) sink.n_splits);
    intervals spans(columns.data(), (size_t) sink.n_splits);
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
    for (int32_t i = 0; i < sink.n_threads; i++) {
        const ggml_instr_thread & th = sink.threads[i];
        s.dropped_ops += (uint64_t) th.dropped;
        if (th.n == 0) {
            continue;
        }
        write_thread(s, graph, i, th, times);
    }
    if (sink.n_splits > 0) {
        write_split_times(s, sink, tick_scale(times.begin, times.end), times);
    }
}

}  // namespace llama_instr
