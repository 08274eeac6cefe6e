// llama-instrumentation-thread.cpp - the state of the calling thread

#include "llama-instrumentation-thread.h"

namespace llama_instr {

thread_state & tl() {
    thread_local thread_state state;
    return state;
}

void stop_compute() {
    tl().compute.stopped = true;
}

log_part * computing_part() {
    return tl().compute.s.get();
}

bool find_computed_node(const ggml_tensor * t, node_reference & out) {
    auto & c = tl().compute;
    const int n = c.s ? ggml_graph_n_nodes(c.gf) : 0;
    for (int k = 0; k < n; k++) {
        const int i = (c.last_found + k) % n;  // the scheduler asks in the order of the graph
        if (ggml_graph_node(c.gf, i) == t) {
            c.last_found = i;
            out = { c.times.compute, c.graph->id, i, c.graph->layers[(size_t) i] };
            return true;
        }
    }
    return false;
}

void write_after_compute(const char * event, std::string line) {
    tl().compute.lines_after.emplace_back(event, std::move(line));
}

}  // namespace llama_instr
