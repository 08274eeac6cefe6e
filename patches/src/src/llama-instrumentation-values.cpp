// llama-instrumentation-values.cpp - stops computes after nodes: reads their values, or lets a debugger do so
//
// Both use the scheduler's eval callback, so they work on every backend. It stops the compute after each such node,
// which breaks the fusion of kernels; the log says that it is perturbed.

#include "llama-instrumentation-values.h"

#include "llama-instrumentation-schema.h"

#include "ggml-backend.h"

#include "llama-context.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace llama_instr {

namespace {

// the index of a node in the compute under way in this thread, -1 if it is none of it
int index_in_compute(compute_state & c, const ggml_tensor * t) {
    const int n = c.s ? ggml_graph_n_nodes(c.gf) : 0;
    for (int k = 0; k < n; k++) {
        const int i = (c.last_found + k) % n;  // the scheduler asks in the order of the graph
        if (ggml_graph_node(c.gf, i) == t) {
            return c.last_found = i;
        }
    }
    return -1;
}

//
// statistics of the nodes that are selected by name
//

constexpr int n_bins = 32;

struct value_stats {
    uint64_t n = 0, nan = 0, inf = 0, zero = 0;
    double   min = std::numeric_limits<double>::infinity();
    double   max = -std::numeric_limits<double>::infinity();
    double   mean = 0.0, m2 = 0.0;  // Welford's running mean and sum of squared deviations
    uint64_t hist[n_bins] = {};

    uint64_t finite() const { return n - nan - inf; }

    void add(double x) {
        n++;
        if (std::isnan(x)) {
            nan++;
            return;
        }
        if (std::isinf(x)) {
            inf++;
            return;
        }
        zero += x == 0.0;
        min = std::min(min, x);
        max = std::max(max, x);
        const double delta = x - mean;
        mean += delta / (double) finite();
        m2   += delta * (x - mean);
    }

    // the second pass, once the range is known
    void bin(double x) {
        if (std::isfinite(x)) {
            const double width = max - min;
            const int    i     = width > 0.0 ? (int) ((x - min) / width * n_bins) : 0;
            hist[std::min(i, n_bins - 1)]++;
        }
    }
};

// Calls `f` with every element of `t`, in any order; false when its type cannot be read.
template <typename F> bool for_each_value(const ggml_tensor * t, const std::vector<uint8_t> & bytes, F f) {
    const auto * traits = ggml_get_type_traits(t->type);
    const bool   is_int = t->type == GGML_TYPE_I32 || t->type == GGML_TYPE_I64 || t->type == GGML_TYPE_I16 || t->type == GGML_TYPE_I8;
    if (t->type != GGML_TYPE_F32 && !is_int && !traits->to_float) {
        return false;
    }
    std::vector<float> row((size_t) t->ne[0]);
    for (int64_t i3 = 0; i3 < t->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < t->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < t->ne[1]; i1++) {
                const uint8_t * data = bytes.data() + i1 * (int64_t) t->nb[1] + i2 * (int64_t) t->nb[2] + i3 * (int64_t) t->nb[3];
                if (t->type != GGML_TYPE_F32 && !is_int && t->nb[0] == ggml_type_size(t->type)) {
                    traits->to_float(data, row.data(), t->ne[0]);
                    for (const float x : row) {
                        f((double) x);
                    }
                    continue;
                }
                for (int64_t i0 = 0; i0 < t->ne[0]; i0++) {
                    const uint8_t * p = data + i0 * (int64_t) t->nb[0];
                    switch (t->type) {
                        case GGML_TYPE_F32: { float   x; memcpy(&x, p, sizeof(x)); f((double) x); } break;
                        case GGML_TYPE_I64: { int64_t x; memcpy(&x, p, sizeof(x)); f((double) x); } break;
                        case GGML_TYPE_I32: { int32_t x; memcpy(&x, p, sizeof(x)); f((double) x); } break;
                        case GGML_TYPE_I16: { int16_t x; memcpy(&x, p, sizeof(x)); f((double) x); } break;
                        case GGML_TYPE_I8:  { int8_t  x; memcpy(&x, p, sizeof(x)); f((double) x); } break;
                        default:            { float   x; traits->to_float(p, &x, 1); f((double) x); } break;
                    }
                }
            }
        }
    }
    return true;
}

bool compute_stats(const ggml_tensor * t, value_stats & stats) {
    // strided views end before their nominal size: read what the strides reach
    std::vector<uint8_t> bytes(ggml_nbytes(t));
    ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
    if (!for_each_value(t, bytes, [&](double x) { stats.add(x); })) {
        return false;
    }
    return for_each_value(t, bytes, [&](double x) { stats.bin(x); });
}

// kept until the `compute` event is written, which the line refers to
void keep_stats(compute_state & c, int node, const ggml_tensor * t, const value_stats & stats) {
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_TENSOR_STATS, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_COMPUTE, c.times.compute).kv(LLAMA_INSTR_K_GRAPH, c.graph->id).kv(LLAMA_INSTR_K_NODE, node);
    line.kv(LLAMA_INSTR_K_NAME, (const char *) t->name).kv_if_known(LLAMA_INSTR_K_LAYER, c.graph->layers[(size_t) node]);
    line.kv(LLAMA_INSTR_K_N, stats.n);
    if (stats.finite() > 0) {
        line.kv(LLAMA_INSTR_K_MIN, stats.min).kv(LLAMA_INSTR_K_MAX, stats.max).kv(LLAMA_INSTR_K_MEAN, stats.mean);
        line.kv(LLAMA_INSTR_K_STD, std::sqrt(stats.m2 / (double) stats.finite()));
    }
    line.kv(LLAMA_INSTR_K_NAN, stats.nan).kv(LLAMA_INSTR_K_INF, stats.inf).kv(LLAMA_INSTR_K_ZERO, stats.zero);
    line.column(LLAMA_INSTR_K_HIST, n_bins, [&](size_t i) { return stats.hist[i]; });
    c.stats.emplace_back(line.end());
}

}  // namespace

// ggml_backend_sched_eval_callback: with `ask`, returns whether the value is wanted; without, the value is there,
// and it returns whether to go on
bool stats_callback(ggml_tensor * t, bool ask, void * /*user_data*/) {
    auto & c = tl().compute;
    if (!c.s || !c.s->reads_values()) {
        return !ask;
    }
    if (ask) {
        return ggml_instr_node_runs(t) && std::regex_search(t->name, c.s->all->stats);
    }
    const int node = index_in_compute(c, t);
    if (node < 0) {
        return true;
    }
    recorder_clock recorder(tl());
    value_stats stats;
    if (!compute_stats(t, stats)) {
        return true;
    }
    keep_stats(c, node, t, stats);
    if (stats.nan > 0) {
        c.s->all->nan_seen = true;
        if (c.s->has_flag(LLAMA_INSTR_STOP_ON_NAN)) {
            c.stopped = true;
            return false;
        }
    }
    return true;
}

//
// the debugger
//

static llama_instr_on_compute on_compute;
static llama_instr_on_node    on_node;

// ggml_backend_sched_eval_callback
static bool debug_callback(ggml_tensor * t, bool ask, void * /*user_data*/) {
    auto & c = tl().compute;
    const int node = index_in_compute(c, t);
    if (node < 0) {
        return !ask;
    }
    if (ask) {
        return c.wanted[(size_t) node] != 0;
    }
    recorder_clock recorder(tl());
    if (on_node && on_node(node) != 0) {
        c.stopped = true;
        return false;
    }
    return true;
}

// The callback is set anew before each compute: one without a wanted node runs as if there were no debugger.
void tell_debugger(const llama_context & ctx, thread_state & t) {
    auto & c = t.compute;
    if (ctx.get_cparams().cb_eval) {
        llama_instr_message(GGML_LOG_LEVEL_WARN, "the debugger sees nothing of this context: the application has an eval callback of its own");
        return;
    }
    c.wanted.assign(c.graph->layers.size(), 0);
    if (on_compute) {
        llama_instr_debug_info info = {};
        info.ctx      = &ctx;
        info.graph    = c.gf;
        info.layers   = c.graph->layers.data();
        info.wanted   = c.wanted.data();
        info.n_nodes  = (int32_t) c.wanted.size();
        info.n_tokens = (int32_t) t.ubatch.n_tokens;
        info.step     = t.step.depth > 0 ? t.step.id : -1;
        info.compute  = c.times.compute;
        info.graph_id = c.graph->id;
        info.encoder  = t.ubatch.encoder;
        on_compute(&info);
    }
    const bool any = std::find(c.wanted.begin(), c.wanted.end(), 1) != c.wanted.end();
    ggml_backend_sched_set_eval_callback(ctx.get_sched(), any ? debug_callback : nullptr, nullptr);
}

}  // namespace llama_instr

void llama_instr_debug(llama_instr_on_compute on_compute_, llama_instr_on_node on_node_) {
    llama_instr::on_compute = on_compute_;
    llama_instr::on_node    = on_node_;
}
