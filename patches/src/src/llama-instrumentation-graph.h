// llama-instrumentation-graph.h - the graphs of a context, as written to the log

#pragma once

#include "llama-instrumentation-kernels.h"

#include "ggml.h"

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

struct graph_state {
    uint64_t uid = 0;
    int      id  = -1;
    std::vector<int32_t>    layers;  // of every node
    std::vector<shared_plan> plans;
    std::vector<last_plan>  last;    // of every thread
    int      n_splits = 0;
    bool     splits_matter = false;  // more than one, or a device
};

// The graph that is about to be computed, if it was not the last one; it is written now. `built_layers` are the
// layers of a graph that was just built.
graph_state & graph_of(log_part & s, context_state & state, ggml_cgraph * gf, const char * source, bool is_update, const std::unordered_map<const ggml_tensor *, int> * built_layers);

}  // namespace llama_instr
