// llama-instrumentation-debug.cpp - a debugger that stops computes after the nodes that it asks for
//
// It uses the scheduler's eval callback, so it works on every backend. The callback is set anew before each compute:
// one without a wanted node runs as if there were no debugger.

#include "llama-instrumentation-debug.h"

#include "llama-instrumentation.h"

#include "ggml-backend.h"

#include "llama-context.h"

#include <algorithm>

namespace llama_instr {

static llama_instr_on_compute on_compute;
static llama_instr_on_node    on_node;

// ggml_backend_sched_eval_callback
static bool debug_callback(ggml_tensor * t, bool ask, void * /*user_data*/) {
    auto & c = tl().compute;
    node_reference node;
    if (!c.s || !find_computed_node(t, node)) {
        return !ask;
    }
    if (ask) {
        return c.wanted[(size_t) node.node] != 0;
    }
    recorder_clock recorder(tl());
    if (on_node && on_node(node.node) != 0) {
        stop_compute();
        return false;
    }
    return true;
}

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
