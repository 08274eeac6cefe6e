// llama-instrumentation-kernels.h - what a compute left in the sink: layers, ops, splits

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

class log_part;
struct context_state;
struct graph_state;

// consecutive kernels of one layer
struct layer_run {
    int32_t layer, first, last;
};

// the order in which the kernels of a graph ran, as written to the log; never changes
struct plan_state {
    int id = -1;
    std::vector<uint64_t>  nodes;  // as in the sink
    std::vector<layer_run> runs;
};

// of a graph, and of the records that refer to it
using shared_plan = std::shared_ptr<const plan_state>;

// writes a plan with these kernels, as in the sink, or like the plan `like` of a graph of the same topology; -1: none
void write_plan(log_part & s, int id, int graph, const std::vector<uint64_t> & nodes, int like = -1);

// the plan that a thread's sink held, as long as its nodes have not changed
struct last_plan {
    shared_plan plan;
    uint64_t version = 0;
};

// writes what the sink holds of compute number `compute`: layers, ops, splits
struct compute_times {
    int    compute;
    uint64_t begin, end;  // ticks
};
void write_kernels(log_part & s, context_state & state, graph_state & graph, const compute_times & times);

}  // namespace llama_instr
