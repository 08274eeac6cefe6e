// llama-instrumentation-stats.cpp - reads the values of nodes, selected by name
//
// Values are read in the scheduler's eval callback. It stops the compute after each such node, which breaks the
// fusion of kernels; the log says that it is perturbed.

#include "llama-instrumentation-stats.h"

#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-thread.h"

#include "llama-instrumentation.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace llama_instr {

namespace {

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

void write_stats(const node_reference & node, const ggml_tensor * t, const value_stats & stats) {
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_TENSOR_STATS, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_COMPUTE, node.compute).kv(LLAMA_INSTR_K_GRAPH, node.graph).kv(LLAMA_INSTR_K_NODE, node.node);
    line.kv(LLAMA_INSTR_K_NAME, (const char *) t->name);
    if (node.layer >= 0) {
        line.kv(LLAMA_INSTR_K_LAYER, node.layer);
    }
    line.kv(LLAMA_INSTR_K_N, stats.n);
    if (stats.finite() > 0) {
        line.kv(LLAMA_INSTR_K_MIN, stats.min).kv(LLAMA_INSTR_K_MAX, stats.max).kv(LLAMA_INSTR_K_MEAN, stats.mean);
        line.kv(LLAMA_INSTR_K_STD, std::sqrt(stats.m2 / (double) stats.finite()));
    }
    line.kv(LLAMA_INSTR_K_NAN, stats.nan).kv(LLAMA_INSTR_K_INF, stats.inf).kv(LLAMA_INSTR_K_ZERO, stats.zero);
    line.column(LLAMA_INSTR_K_HIST, n_bins, [&](size_t i) { return stats.hist[i]; });
    write_after_compute(LLAMA_INSTR_EV_TENSOR_STATS, std::string(line.end()));
}

}  // namespace

// ggml_backend_sched_eval_callback: with `ask`, returns whether the value is wanted; without, the value is there,
// and it returns whether to go on
bool stats_callback(ggml_tensor * t, bool ask, void * /*user_data*/) {
    log_part * s = computing_part();
    if (!s || !s->reads_values()) {
        return !ask;
    }
    if (ask) {
        return ggml_instr_node_runs(t) && std::regex_search(t->name, s->stats);
    }
    node_reference node;
    if (!find_computed_node(t, node)) {
        return true;
    }
    recorder_clock recorder(tl());
    value_stats stats;
    if (!compute_stats(t, stats)) {
        return true;
    }
    write_stats(node, t, stats);
    if (stats.nan > 0) {
        s->all->nan_seen = true;
        if ((s->flags & LLAMA_INSTR_STOP_ON_NAN) != 0) {
            stop_compute();
            return false;
        }
    }
    return true;
}

}  // namespace llama_instr
