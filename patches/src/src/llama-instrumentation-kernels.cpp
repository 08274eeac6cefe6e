// llama-instrumentation-kernels.cpp - what a compute left in the sink: layers, ops, splits
//
// The order in which the kernels of a graph run is written once per distinct order; after that a compute
// costs a number or two per kernel.

#include "llama-instrumentation-session.h"

#include <algorithm>
#include <cstring>

namespace llama_instr {

namespace {

int32_t first_node(uint64_t nodes) { return (int32_t) (nodes >> 32); }
int32_t n_nodes(uint64_t nodes)    { return (int32_t) (uint32_t) nodes; }

// the order in which the sink says that the kernels ran: the one written before, or a new one
const plan_state & plan_of(session & s, graph_state & graph, const ggml_instr_thread & th) {
    const size_t n = (size_t) th.n;
    for (const auto & plan : graph.plans) {
        if (plan.nodes.size() == n && memcmp(plan.nodes.data(), th.nodes, n * sizeof(th.nodes[0])) == 0) {
            return plan;
        }
    }
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
// read: no calibration that could drift. In fixed point with 32 fractional bits: off by less than a
// nanosecond in the billions of ticks of a second, and never running backwards.
struct tick_scale {
    uint64_t begin_ns;
    uint64_t begin_ticks;
    uint64_t ns_per_tick;

    __extension__ typedef unsigned __int128 wide;

    explicit tick_scale(const compute_times & times) : begin_ns(times.begin_ns), begin_ticks(times.begin_ticks) {
        const uint64_t ticks = times.end_ticks - times.begin_ticks;
        ns_per_tick = ticks > 0 ? (uint64_t) ((((wide) (times.end_ns - times.begin_ns) << 32) + ticks / 2) / ticks) : 0;
    }

    uint64_t ns(uint64_t ticks) const { return begin_ns + (ticks > begin_ticks ? duration(ticks - begin_ticks) : 0); }

    uint64_t duration(uint64_t ticks) const { return (uint64_t) (((wide) ticks * ns_per_tick + ((uint64_t) 1 << 31)) >> 32); }
};

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
        const tick_scale scale(times);
        thread_local std::vector<uint64_t> ends;
        thread_local intervals spans;
        ends.resize(n);
        spans.reset(n);
        uint64_t ticks = begin;
        uint64_t at    = scale.ns(begin);
        for (size_t i = 0; i < n; i++) {
            if (gap) {
                ticks += gap[i];
                at     = scale.ns(ticks);
            }
            ticks  += dur[i];
            ends[i] = scale.ns(ticks);
            spans.add(at, ends[i]);
            at = ends[i];
        }
        if (thread == 0) {
            format_layers(spans, ends, lines);
        }
        if (with_ops) {
            format_ops(spans, wait, scale, lines);
        }
    }

    // the gaps inside a run belong to it
    void format_layers(const intervals & ops, const std::vector<uint64_t> & ends, log_lines & lines) const {
        const auto & runs = plan->runs;
        thread_local intervals spans;
        spans.reset(runs.size());
        for (const auto & run : runs) {
            spans.add(ends[(size_t) run.first] - ops.dur[(size_t) run.first], ends[(size_t) run.last]);
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
        if (const uint64_t tail = spans.until(scale.ns(last))) {
            line.kv(LLAMA_INSTR_K_TAIL, tail);
        }
        line.end();
    }
};

// the columns of a record in the numbers' type; returns false when a number does not fit
template <typename T> bool fill_columns(kernels_record & record, const ggml_instr_thread & th, std::vector<T> & columns) {
    const size_t n = (size_t) th.n;
    columns.resize((record.with_wait ? 3 : 2) * n);
    uint64_t at = th.begin[0], all = 0, gaps = 0;
    for (size_t i = 0; i < n; i++) {
        // two cores' counters may disagree by some ticks: time does not run backwards here
        const uint64_t begin = std::max(th.begin[i], at);
        const uint64_t end   = std::max(th.end[i], begin);
        columns[i]     = (T) (end - begin);
        columns[n + i] = (T) (begin - at);
        all  |= (end - begin) | (begin - at);
        gaps |= begin - at;
        at = end;
    }
    record.begin    = th.begin[0];
    record.with_gap = gaps != 0;
    if (record.with_wait) {
        T * wait = columns.data() + (record.with_gap ? 2 : 1) * n;
        for (size_t i = 0; i < n; i++) {
            wait[i] = (T) th.wait[i];
            all |= th.wait[i];
        }
    }
    columns.resize((1 + (size_t) record.with_gap + (size_t) record.with_wait) * n);
    return sizeof(T) == sizeof(uint64_t) || all >> 32 == 0;
}

template <typename T> std::string_view bytes_of(const std::vector<T> & columns) {
    return { (const char *) columns.data(), columns.size() * sizeof(T) };
}

void write_thread(session & s, graph_state & graph, int32_t thread, const ggml_instr_thread & th, const compute_times & times) {
    kernels_record record = {};
    record.plan      = &plan_of(s, graph, th);
    record.times     = times;
    record.last      = th.last;
    record.thread    = thread;
    record.with_ops  = s.detail != level::minimal;
    record.with_wait = s.detail == level::verbose;
    thread_local std::vector<uint32_t> columns;
    if (fill_columns(record, th, columns)) {
        s.add(record, { bytes_of(columns) });
        return;
    }
    std::vector<uint64_t> wide;  // a kernel took longer than 32 bits of ticks
    record.wide = true;
    fill_columns(record, th, wide);
    s.add(record, { bytes_of(wide) });
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
    for (int32_t i = 0; i < sink.n_threads; i++) {
        const ggml_instr_thread & th = sink.threads[i];
        s.dropped_ops += (uint64_t) th.dropped;
        if (th.n == 0) {
            continue;
        }
        write_thread(s, graph, i, th, times);
    }
    if (graph.splits_matter && sink.n_splits > 0) {
        write_split_times(s, sink, tick_scale(times), times);
    }
}

}  // namespace llama_instr
