// llama-instrumentation-graph.h - the graphs of a context, as written to the log

#pragma once

#include "llama-instrumentation-devices.h"
#include "llama-instrumentation-kernels.h"

#include "ggml-instrumentation.h"
#include "ggml.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

// of a column of nodes: its values, and which nodes have the same one
struct column_digests {
    uint64_t values = 0;
    uint64_t places = 0;
};

// Digests of what the log says of a graph. Graphs with the same topology differ in shapes only.
struct graph_digests {
    uint64_t topology = 0;  // all but these:
    uint64_t splits   = 0;
    column_digests ne, bytes, params, nb;
    std::vector<uint64_t> leafs;  // the shape of each
};

// of a graph, and of the records that refer to them
using shared_experts = std::shared_ptr<const std::vector<ggml_instr_experts>>;

struct graph_state {
    uint64_t uid = 0;  // ggml's, of the last graph with this content
    int      id  = -1;
    const char *  source = "";
    graph_digests digests;
    std::vector<int32_t>    layers;  // of every node
    std::vector<shared_plan> plans;
    std::vector<last_plan>  last;    // of every thread
    std::shared_ptr<device_plan_table> device_plans;
    shared_experts experts;  // that are counted
    int      n_splits = 0;
    bool     splits_matter = false;  // more than one, or a device
    bool     written = true;  // not if it does not fit into a line

    bool is_like(const graph_state & other) const { return digests.topology == other.digests.topology; }

    bool is_same(const graph_state & other) const {
        const auto & a = digests;
        const auto & b = other.digests;
        return is_like(other) && a.splits == b.splits && a.ne.values == b.ne.values && a.bytes.values == b.bytes.values &&
            a.params.values == b.params.values && a.nb.values == b.nb.values && a.leafs == b.leafs && strcmp(source, other.source) == 0;
    }
};

// A context's graphs that are kept, the last used ones. Readers keep as many (docs/reference/log-format.md).
constexpr size_t most_graphs = 64;

// weights of a model that a graph gives by their ids; readers keep as many
constexpr int most_weights = 16384;

// The graph that is about to be computed, if it was not the last one. It is written now, unless a kept one has the same
// content; if one has the same topology, only what differs is. `built_layers` are the layers of a graph that was just built.
graph_state & graph_of(log_part & s, context_state & state, ggml_cgraph * gf, const char * source, bool is_update, const std::unordered_map<const ggml_tensor *, int> * built_layers);

}  // namespace llama_instr
