// llama-instrumentation-kernels.cpp - what a compute left in the sink: layers, ops, splits
//
// The order in which the kernels of a graph run is written once per distinct order. After that, a compute costs
// one or two numbers per kernel.

#include "llama-instrumentation-kernels.h"

#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-session.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace llama_instr {

namespace {

int32_t first_node(uint64_t nodes) { return (int32_t) (nodes >> 32); }
int32_t n_nodes(uint64_t nodes)    { return (int32_t) (uint32_t) nodes; }

// the plan with the order in which the kernels ran; nullptr if no such plan was written
shared_plan known_plan(const graph_state & graph, const ggml_instr_thread & th) {
    const size_t n = (size_t) th.n;
    for (const auto & plan : graph.plans) {
        if (plan->nodes.size() == n && memcmp(plan->nodes.data(), th.nodes, n * sizeof(th.nodes[0])) == 0) {
            return plan;
        }
    }
    return nullptr;
}

// the same of a graph of another shape
shared_plan plan_like(const context_state & state, const graph_state & graph, const ggml_instr_thread & th) {
    for (const auto & other : state.graphs) {
        if (other.get() != &graph && other->is_like(graph)) {
            if (shared_plan plan = known_plan(*other, th)) {
                return plan;
            }
        }
    }
    return nullptr;
}

shared_plan new_plan(log_part & s, const context_state & state, graph_state & graph, const ggml_instr_thread & th) {
    const shared_plan like = plan_like(state, graph, th);
    const auto made = std::make_shared<plan_state>();
    graph.plans.push_back(made);
    plan_state & plan = *made;
    plan.nodes.assign(th.nodes, th.nodes + th.n);
    for (int32_t i = 0; i < th.n; i++) {
        const int32_t layer = graph.layers[(size_t) first_node(plan.nodes[(size_t) i])];
        if (i == 0 || layer != plan.runs.back().layer) {
            plan.runs.push_back({ layer, i, i });
        }
        plan.runs.back().last = i;
    }
    if (s.detail == level::minimal) {
        return made;
    }
    plan.id = s.all->next_plan++;
    write_plan(s, plan.id, graph.id, plan.nodes, like ? like->id : -1);
    return made;
}

const shared_plan & plan_of(log_part & s, const context_state & state, graph_state & graph, int32_t thread, const ggml_instr_thread & th) {
    if (graph.last.size() <= (size_t) thread) {
        graph.last.resize((size_t) thread + 1);
    }
    last_plan & last = graph.last[(size_t) thread];
    if (!last.plan || last.version != th.version || last.plan->nodes.size() != (size_t) th.n) {
        shared_plan known = known_plan(graph, th);
        last = { known ? std::move(known) : new_plan(s, state, graph, th), th.version };
    }
    return last.plan;
}

// intervals as a begin and two columns: the gap before each (0 for the first) and its duration
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
        // the counters of two cores may differ by some ticks; time must not run backwards
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

// The intervals of kernels from their `times`, `n_times` of each, and their ends in nanoseconds since the compute
// began. The first kernel begins `ticks` after that. `F` is wide enough for all products.
template <typename F>
void to_intervals(const tick_scale & scale, F ticks, size_t n, const uint32_t * times, size_t n_times, intervals & out, uint64_t * ends) {
    const auto ns = [&scale](F t) { return (uint64_t) ((t * scale.ns_per_tick + tick_scale::half) >> tick_scale::fraction_bits); };
    uint64_t at = ns(ticks), any_gap = 0;
    out.begin_ns = scale.begin.ns + at;
    for (size_t i = 0; i < n; i++, times += n_times) {
        ticks += ggml_instr_unpack(times[1]);
        const uint64_t begin = ns(ticks);
        out.gap[i] = begin - at;
        any_gap |= begin - at;
        ticks += ggml_instr_unpack(times[0]);
        at = ends[i] = ns(ticks);
        out.dur[i] = at - begin;
    }
    out.any_gap = any_gap;
    out.count   = n;
    out.at      = scale.begin.ns + at;
}

// the kernels of one thread in one compute; the tail holds their times, laid out as in the sink
struct alignas(8) kernels_record {
    const plan_state * plan;  // the log owns it with the record
    compute_times      times;
    uint64_t           begin;  // of the first
    uint64_t           next;   // when one more could have begun
    int32_t            thread;
    bool               with_wait, with_ops;

    void format(std::string_view tail, log_lines & lines) const {
        const size_t n       = plan->nodes.size();
        const size_t n_times = (size_t) ggml_instr_n_times(with_wait);
        const auto * ticks   = (const uint32_t *) tail.data();
        const tick_scale scale(lines.clock->at(times.begin), lines.clock->at(times.end));
        uint64_t * const numbers = lines.scratch(5 * n);
        uint64_t * const ends    = numbers + 2 * n;
        intervals spans(numbers, n);
        const uint64_t first = scale.since_begin(begin);
        if (scale.is_short(scale.since_begin(next))) {
            to_intervals<uint64_t>(scale, first, n, ticks, n_times, spans, ends);
        } else {
            to_intervals<tick_scale::wide>(scale, first, n, ticks, n_times, spans, ends);
        }
        if (thread == 0) {
            format_layers(spans, ends, scale.begin.ns, intervals(ends + n, n), lines);
        }
        if (with_ops) {
            format_ops(spans, with_wait ? ticks + 2 : nullptr, scale, lines);
        }
    }

  private:
    // the gaps inside a run belong to it
    void format_layers(const intervals & ops, const uint64_t * ends, uint64_t t, intervals spans, log_lines & lines) const {
        const auto & runs = plan->runs;
        for (const auto & run : runs) {
            const uint64_t end_of_first = t + ends[(size_t) run.first];
            spans.add(end_of_first - ops.dur[(size_t) run.first], t + ends[(size_t) run.last]);
        }
        json_line & line = lines.begin(LLAMA_INSTR_EV_LAYERS, spans.begin_ns);
        line.kv(LLAMA_INSTR_K_COMPUTE, times.compute);
        line.column(LLAMA_INSTR_K_LAYER, runs.size(), [&](size_t i) { return runs[i].layer; });
        spans.write(line);
        line.end();
    }

    // `wait`: the first kernel's, if they are known
    void format_ops(const intervals & spans, const uint32_t * wait, const tick_scale & scale, log_lines & lines) const {
        json_line & line = lines.begin(LLAMA_INSTR_EV_OPS, spans.begin_ns);
        line.kv(LLAMA_INSTR_K_COMPUTE, times.compute).kv(LLAMA_INSTR_K_PLAN, plan->id);
        if (thread != 0) {
            line.kv(LLAMA_INSTR_K_THREAD, thread);
        }
        spans.write(line);
        if (wait) {
            const size_t n_times = (size_t) ggml_instr_n_times(true);
            line.column(LLAMA_INSTR_K_WAIT, plan->nodes.size(), [&](size_t i) {
                return std::min(scale.duration(ggml_instr_unpack(wait[i * n_times])), spans.dur[i]);
            });
        }
        if (const uint64_t returned = scale.ns(next); returned > spans.at) {
            line.kv(LLAMA_INSTR_K_TAIL, returned - spans.at);
        }
        line.end();
    }
};

// `returned`: when the barrier after the last kernel ended, which only the caller's thread knows
void add_thread(log_part & s, const context_state & state, graph_state & graph, int32_t thread, const ggml_instr_thread & th, uint64_t returned, const compute_times & times) {
    const shared_plan & plan = plan_of(s, state, graph, thread, th);
    kernels_record record = {};
    record.plan      = plan.get();
    record.times     = times;
    record.begin     = th.begin;
    record.next      = returned;
    record.thread    = thread;
    record.with_ops  = s.detail != level::minimal;
    record.with_wait = th.record_wait;
    const size_t n_times = (size_t) th.n * (size_t) ggml_instr_n_times(th.record_wait);
    const uint32_t n_lines = (thread == 0) + record.with_ops;
    s.add(record, std::string_view((const char *) th.times, n_times * sizeof(*th.times)), plan, n_lines);
}

// the experts that a compute used; the tail holds the uses of each, laid out as in the sink
struct alignas(8) experts_record {
    const std::vector<ggml_instr_experts> * experts;  // the log owns them with the record
    compute_times times;

    void format(std::string_view tail, log_lines & lines) const {
        const auto * uses = (const uint32_t *) tail.data();
        json_line & line = lines.begin(LLAMA_INSTR_EV_EXPERTS, lines.clock->ns(times.begin));
        line.kv(LLAMA_INSTR_K_COMPUTE, times.compute);
        // of those that a node on the CPU used, as a list for each node
        const auto lists = [&](const char * key, auto && add) {
            line.array(key);
            for (const auto & of : *experts) {
                const uint32_t * begin = uses + of.offset;
                if (std::any_of(begin, begin + of.n, [](uint32_t n) { return n > 0; })) {
                    add(of, begin);
                }
            }
            line.close_array();
        };
        const auto items = [&line](const ggml_instr_experts & of, const uint32_t * begin, auto && item) {
            line.inner_array();
            for (int32_t i = 0; i < of.n; i++) {
                if (begin[i] > 0) {
                    line.item(item(i));
                }
            }
            line.close_array();
        };
        lists(LLAMA_INSTR_K_NODE, [&](const auto & of, const uint32_t *) { line.item(of.node); });
        lists(LLAMA_INSTR_K_EXPERT, [&](const auto & of, const uint32_t * begin) { items(of, begin, [](int32_t i) { return i; }); });
        if (std::any_of(uses, uses + tail.size() / sizeof(*uses), [](uint32_t n) { return n > 1; })) {
            lists(LLAMA_INSTR_K_USES, [&](const auto & of, const uint32_t * begin) { items(of, begin, [begin](int32_t i) { return begin[i]; }); });
        }
        line.end();
    }
};

// the tail holds the splits, laid out as in the sink
struct alignas(8) splits_record {
    compute_times times;

    void format(std::string_view tail, log_lines & lines) const {
        const auto * splits = (const ggml_instr_split *) tail.data();
        const size_t n      = tail.size() / sizeof(*splits);
        const tick_scale scale(lines.clock->at(times.begin), lines.clock->at(times.end));
        intervals spans(lines.scratch(2 * n), n);
        for (size_t i = 0; i < n; i++) {
            spans.add(scale.ns(splits[i].begin), scale.ns(splits[i].end));
        }
        json_line & line = lines.begin(LLAMA_INSTR_EV_SPLITS, spans.begin_ns);
        line.kv(LLAMA_INSTR_K_COMPUTE, times.compute);
        line.column(LLAMA_INSTR_K_SPLIT, n, [splits](size_t i) { return splits[i].split; });
        spans.write(line);
        line.column(LLAMA_INSTR_K_ASYNCHRONOUS, n, [splits](size_t i) { return splits[i].asynchronous ? 1 : 0; });
        line.end();
    }
};

}  // namespace

void write_plan(log_part & s, int id, int graph, const std::vector<uint64_t> & nodes, int like) {
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_PLAN, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_PLAN, id).kv(LLAMA_INSTR_K_GRAPH, graph);
    if (like >= 0) {
        line.kv(LLAMA_INSTR_K_LIKE, like);
    } else {
        line.column(LLAMA_INSTR_K_NODE, nodes.size(), [&](size_t i) { return first_node(nodes[i]); });
        if (std::any_of(nodes.begin(), nodes.end(), [](uint64_t of) { return n_nodes(of) != 1; })) {
            line.column(LLAMA_INSTR_K_N, nodes.size(), [&](size_t i) { return n_nodes(nodes[i]); });
        }
    }
    s.write(LLAMA_INSTR_EV_PLAN, line);
}

void write_kernels(log_part & s, context_state & state, graph_state & graph, const compute_times & times) {
    const ggml_instr_sink & sink = state.sink;
    if (sink.next_experts > 0) {
        const auto & last = graph.experts->back();
        const size_t n_uses = (size_t) last.offset + (size_t) last.n;
        s.add(experts_record { graph.experts.get(), times }, std::string_view((const char *) sink.uses, n_uses * sizeof(*sink.uses)), graph.experts);
    }
    for (int32_t i = 0; i < sink.n_threads; i++) {
        const ggml_instr_thread & th = sink.threads[i];
        s.dropped_ops += (uint64_t) th.dropped;
        if (th.n > 0) {
            add_thread(s, state, graph, i, th, sink.threads[0].next, times);
        }
    }
    if (sink.n_splits > 0) {
        s.add(splits_record { times }, std::string_view((const char *) sink.splits, (size_t) sink.n_splits * sizeof(*sink.splits)));
    }
}

}  // namespace llama_instr
