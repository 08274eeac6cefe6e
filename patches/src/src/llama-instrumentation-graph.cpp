// llama-instrumentation-graph.cpp - a graph as columns, written once, with the layer of every node

#include "llama-instrumentation-graph.h"

#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-session.h"

#include "ggml-backend.h"

#include "llama-context.h"

#include <algorithm>

namespace llama_instr {

namespace {

// "ffn_out-3" -> 3, "cache_k_l12" -> 12, "blk.7.ffn_up.weight" -> 7
int layer_of_name(const char * name) {
    const char * at = nullptr;
    if (const char * blk = strstr(name, "blk.")) {
        at = blk + 4;
    } else if (const char * cache = strstr(name, "_l")) {
        at = strncmp(name, "cache_", 6) == 0 ? cache + 2 : nullptr;
    }
    if (at == nullptr) {
        // llama.cpp's suffix; ggml's follow it: "Qcur-3 (reshaped)"
        const char * dash = strrchr(name, '-');
        at = dash ? dash + 1 : nullptr;
    }
    if (at == nullptr || *at < '0' || *at > '9') {
        return -1;
    }
    return (int) strtol(at, nullptr, 10);
}

int layer_of_node(const ggml_tensor * node, const std::unordered_map<const ggml_tensor *, int> * built) {
    if (built) {
        const auto it = built->find(node);
        if (it != built->end() && it->second >= 0) {
            return it->second;
        }
    }
    int layer = layer_of_name(node->name);
    for (int i = 0; layer < 0 && i < GGML_MAX_SRC; i++) {
        const ggml_tensor * src = node->src[i];
        // a weight or a cache of a layer; not another node, which may be the output of the previous layer
        if (src && src->op == GGML_OP_NONE) {
            layer = layer_of_name(src->name);
        }
    }
    return layer;
}

bool is_norm_of(const ggml_tensor * norm, const ggml_tensor * scaled) {
    return (norm->op == GGML_OP_RMS_NORM || norm->op == GGML_OP_NORM) && scaled->src[0] == norm;
}

const char * buffer_name(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer ? ggml_backend_buffer_name(buffer) : "";
}

// without trailing ones; ggml_n_dims() also leaves out a trailing 0, of a tensor without elements
size_t n_dims(const ggml_tensor * t) {
    size_t n = GGML_MAX_DIMS;
    while (n > 1 && t->ne[n - 1] == 1) {
        n--;
    }
    return n;
}

// numbers the leafs and the buffers of a graph in the order in which its nodes name them
struct graph_index {
    std::unordered_map<const ggml_tensor *, int> nodes;
    std::unordered_map<const ggml_tensor *, int> leaf_ids;
    std::vector<const ggml_tensor *> leafs;
    std::vector<std::string> buffers;

    explicit graph_index(ggml_cgraph * gf) {
        const int n = ggml_graph_n_nodes(gf);
        nodes.reserve((size_t) n);
        for (int i = 0; i < n; i++) {
            nodes.emplace(ggml_graph_node(gf, i), i);
        }
        for (int i = 0; i < n; i++) {
            const ggml_tensor * node = ggml_graph_node(gf, i);
            buffer_id(node);
            for (const ggml_tensor * src : node->src) {
                if (src && nodes.find(src) == nodes.end() && leaf_ids.emplace(src, (int) leafs.size()).second) {
                    leafs.push_back(src);
                }
            }
        }
    }

    int buffer_id(const ggml_tensor * t) {
        const char * name = buffer_name(t);
        if (name[0] == '\0') {
            return -1;
        }
        const auto it = std::find(buffers.begin(), buffers.end(), name);
        if (it == buffers.end()) {
            buffers.push_back(name);
            return (int) buffers.size() - 1;
        }
        return (int) (it - buffers.begin());
    }

    int source_id(const ggml_tensor * src) const {
        const auto it = nodes.find(src);
        return it != nodes.end() ? it->second : -1 - leaf_ids.at(src);
    }
};

void write_leafs(json_line & line, const graph_index & index, const model_state & model) {
    line.array(LLAMA_INSTR_K_LEAFS);
    for (const ggml_tensor * leaf : index.leafs) {
        line.object().kv(LLAMA_INSTR_K_NAME, leaf->name).kv(LLAMA_INSTR_K_TYPE, ggml_type_name(leaf->type));
        line.column(LLAMA_INSTR_K_NE, n_dims(leaf), [leaf](size_t i) { return leaf->ne[i]; });
        line.kv(LLAMA_INSTR_K_BYTES, ggml_nbytes(leaf));
        const char * buffer = buffer_name(leaf);
        if (buffer[0] != '\0') {
            line.kv(LLAMA_INSTR_K_BUFFER, buffer);
        }
        const auto weight = model.weights.find(leaf);
        if (weight != model.weights.end()) {
            line.kv(LLAMA_INSTR_K_TENSOR, weight->second);
        }
        line.close_object();
    }
    line.close_array();
}

template <typename F> void write_lists(json_line & line, const char * key, ggml_cgraph * gf, F list) {
    line.array(key);
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        line.inner_array();
        list(ggml_graph_node(gf, i));
        line.close_array();
    }
    line.close_array();
}

void write_nodes(json_line & line, ggml_cgraph * gf, graph_index & index, const std::vector<int32_t> & layers, bool strides) {
    const size_t n = (size_t) ggml_graph_n_nodes(gf);
    const auto node = [gf](size_t i) { return ggml_graph_node(gf, (int) i); };
    line.object(LLAMA_INSTR_K_NODES);
    line.column(LLAMA_INSTR_K_NAME,  n, [&](size_t i) { return (const char *) node(i)->name; });
    line.column(LLAMA_INSTR_K_OP,    n, [&](size_t i) { return ggml_op_name(node(i)->op); });
    line.column(LLAMA_INSTR_K_LAYER, n, [&](size_t i) { return layers[i]; });
    line.column(LLAMA_INSTR_K_TYPE,  n, [&](size_t i) { return ggml_type_name(node(i)->type); });
    write_lists(line, LLAMA_INSTR_K_NE, gf, [&](const ggml_tensor * t) {
        for (size_t i = 0; i < n_dims(t); i++) {
            line.item(t->ne[i]);
        }
    });
    line.column(LLAMA_INSTR_K_BYTES, n, [&](size_t i) { return ggml_nbytes(node(i)); });
    write_lists(line, LLAMA_INSTR_K_SRC, gf, [&](const ggml_tensor * t) {
        for (const ggml_tensor * src : t->src) {
            if (src) {
                line.item(index.source_id(src));
            }
        }
    });
    line.column(LLAMA_INSTR_K_BUFFER, n, [&](size_t i) { return index.buffer_id(node(i)); });
    write_lists(line, LLAMA_INSTR_K_PARAMS, gf, [&](const ggml_tensor * t) {
        size_t last = sizeof(t->op_params) / sizeof(t->op_params[0]);
        while (last > 0 && t->op_params[last - 1] == 0) {
            last--;
        }
        for (size_t i = 0; i < last; i++) {
            line.item(t->op_params[i]);
        }
    });
    line.column(LLAMA_INSTR_K_EXEC, n, [&](size_t i) { return ggml_instr_node_runs(node(i)) ? 1 : 0; });
    if (strides) {
        write_lists(line, LLAMA_INSTR_K_NB, gf, [&](const ggml_tensor * t) {
            for (size_t i = 0; i < n_dims(t); i++) {
                line.item(t->nb[i]);
            }
        });
    }
    line.close_object();
}

void write_splits_of_graph(json_line & line, ggml_backend_sched_t sched) {
    line.array(LLAMA_INSTR_K_SPLITS);
    for (int i = 0; i < ggml_backend_sched_get_n_splits(sched); i++) {
        int32_t start, end;
        ggml_backend_t backend;
        ggml_instr_sched_get_split(sched, i, &start, &end, &backend);
        line.object().kv(LLAMA_INSTR_K_START, start).kv(LLAMA_INSTR_K_END, end);
        line.kv(LLAMA_INSTR_K_BACKEND, ggml_backend_name(backend)).close_object();
    }
    line.close_array();
}

void write_graph(log_part & s, context_state & state, const graph_state & graph, ggml_cgraph * gf, const char * source, const char * why) {
    ggml_backend_sched_t sched = state.ctx->get_sched();
    const int n_nodes = ggml_graph_n_nodes(gf);
    int n_exec = 0;
    for (int i = 0; i < n_nodes; i++) {
        n_exec += ggml_instr_node_runs(ggml_graph_node(gf, i));
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_GRAPH, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_GRAPH, graph.id).kv(LLAMA_INSTR_K_CTX, state.id).kv(LLAMA_INSTR_K_UID, graph.uid);
    line.kv(LLAMA_INSTR_K_SOURCE, source).kv(LLAMA_INSTR_K_WHY, why);
    line.kv(LLAMA_INSTR_K_N_NODES, n_nodes).kv(LLAMA_INSTR_K_N_EXEC, n_exec);
    write_splits_of_graph(line, sched);
    if (s.detail != level::minimal) {
        graph_index index(gf);
        line.column(LLAMA_INSTR_K_BUFFERS, index.buffers.size(), [&](size_t i) { return index.buffers[i]; });
        write_leafs(line, index, s.known.of(&state.ctx->get_model()));
        write_nodes(line, gf, index, graph.layers, s.detail == level::verbose);
    }
    s.write(LLAMA_INSTR_EV_GRAPH, line);
}

}  // namespace

graph_state & graph_of(log_part & s, context_state & state, ggml_cgraph * gf, const char * source, bool is_update, const std::unordered_map<const ggml_tensor *, int> * built_layers) {
    auto graph = std::make_unique<graph_state>();
    graph->uid = ggml_instr_graph_uid(gf);
    graph->id  = s.all->next_graph++;
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        const ggml_tensor * node  = ggml_graph_node(gf, i);
        const int           layer = layer_of_node(node, built_layers);
        // some models build a norm without a layer, and name only the product with its weight
        if (i > 0 && graph->layers.back() < 0 && is_norm_of(ggml_graph_node(gf, i - 1), node)) {
            graph->layers.back() = layer;
        }
        graph->layers.push_back(layer);
    }
    graph->n_splits      = ggml_backend_sched_get_n_splits(state.ctx->get_sched());
    graph->splits_matter = state.has_device || graph->n_splits > 1;

    const char * why = is_update ? "memory_update" : state.graphs_known ? "changed" : "first";
    write_graph(s, state, *graph, gf, source, why);
    write_memory_if_changed(s, state);
    if (!is_update) {
        state.graphs_known = true;
    }
    state.graph = std::move(graph);
    return *state.graph;
}

}  // namespace llama_instr
