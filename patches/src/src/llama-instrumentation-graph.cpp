// llama-instrumentation-graph.cpp - a graph as columns, written once, with the layer of every node

#include "llama-instrumentation-graph.h"

#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-session.h"

#include "ggml-backend.h"

#include "llama-context.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

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
    const long layer = strtol(at, nullptr, 10);
    return layer <= INT32_MAX ? (int) layer : -1;
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

// A digest of what the log says of something: FNV-1a over words, with the high bits folded in.
class digest {
  public:
    digest & add(uint64_t word) {
        value = (value ^ word) * 0x100000001b3;
        value ^= value >> 29;
        return *this;
    }

    digest & add(const char * text) {
        for (; *text; text++) {
            value = (value ^ (uint8_t) *text) * 0x100000001b3;
        }
        return add(uint64_t(0));
    }

    uint64_t value = 0xcbf29ce484222325;
};

// the parameters of a node up to the last that is not 0
size_t n_params(const ggml_tensor * t) {
    size_t last = sizeof(t->op_params) / sizeof(t->op_params[0]);
    while (last > 0 && t->op_params[last - 1] == 0) {
        last--;
    }
    return last;
}

void add_shape(digest & ne, const ggml_tensor * t) {
    for (size_t i = 0; i < GGML_MAX_DIMS; i++) {
        ne.add((uint64_t) t->ne[i]);
    }
}

struct graph_split {
    int32_t start, end;
    ggml_backend_t backend;
};

std::vector<graph_split> splits_of(const context_state & state, ggml_cgraph * gf) {
    if (!state.ctx) {
        return { { 0, ggml_graph_n_nodes(gf), state.backend } };
    }
    ggml_backend_sched_t sched = state.ctx->get_sched();
    std::vector<graph_split> splits((size_t) ggml_backend_sched_get_n_splits(sched));
    for (size_t i = 0; i < splits.size(); i++) {
        ggml_instr_sched_get_split(sched, (int32_t) i, &splits[i].start, &splits[i].end, &splits[i].backend);
    }
    return splits;
}

const model_state & model_of(log_part & s, const context_state & state) {
    static const model_state none;
    return state.ctx ? s.known.of(&state.ctx->get_model()) : none;
}

graph_digests digests_of(ggml_cgraph * gf, graph_index & index, const std::vector<int32_t> & layers, const model_state & model, const std::vector<graph_split> & all_splits) {
    digest topology, ne, bytes, params, nb, splits;
    for (const auto & split : all_splits) {
        splits.add((uint64_t) split.start).add((uint64_t) split.end).add(ggml_backend_name(split.backend));
    }
    for (const ggml_tensor * leaf : index.leafs) {
        const auto weight = model.weights.find(leaf);
        topology.add(leaf->name).add((uint64_t) leaf->type).add(buffer_name(leaf));
        topology.add(weight != model.weights.end() ? (uint64_t) weight->second.id : UINT64_MAX);
    }
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        topology.add(node->name).add((uint64_t) node->op).add((uint64_t) node->type).add((uint64_t) layers[(size_t) i]);
        topology.add((uint64_t) index.buffer_id(node)).add(ggml_instr_node_runs(node));
        for (const ggml_tensor * src : node->src) {
            topology.add(src ? (uint64_t) index.source_id(src) : INT32_MAX);
        }
        add_shape(ne, node);
        bytes.add(ggml_nbytes(node));
        for (size_t k = 0; k < GGML_MAX_DIMS; k++) {
            nb.add(node->nb[k]);
        }
        params.add(n_params(node));
        for (size_t k = 0; k < n_params(node); k++) {
            params.add((uint64_t) node->op_params[k]);
        }
    }
    for (const std::string & name : index.buffers) {
        topology.add(name.c_str());
    }
    graph_digests found;
    found.topology      = topology.value;
    found.ne.values     = ne.value;
    found.bytes.values  = bytes.value;
    found.params.values = params.value;
    found.nb.values     = nb.value;
    found.splits        = splits.value;
    for (const ggml_tensor * leaf : index.leafs) {
        digest shape;
        add_shape(shape, leaf);
        found.leafs.push_back(shape.add(ggml_nbytes(leaf)).value);
    }
    return found;
}

// a weight by its id alone, unless the graph of a dry run, which readers take by itself, has it
void write_leaf(json_line & line, const ggml_tensor * leaf, const model_state & model, bool is_dry) {
    const auto weight = model.weights.find(leaf);
    const bool is_weight = weight != model.weights.end();
    line.object();
    if (!is_weight || !weight->second.same_name || weight->second.id >= most_weights || is_dry) {
        line.kv(LLAMA_INSTR_K_NAME, leaf->name).kv(LLAMA_INSTR_K_TYPE, ggml_type_name(leaf->type));
        line.column(LLAMA_INSTR_K_NE, n_dims(leaf), [leaf](size_t i) { return leaf->ne[i]; });
        line.kv(LLAMA_INSTR_K_BYTES, ggml_nbytes(leaf));
        const char * buffer = buffer_name(leaf);
        if (buffer[0] != '\0') {
            line.kv(LLAMA_INSTR_K_BUFFER, buffer);
        }
    }
    if (is_weight) {
        line.kv(LLAMA_INSTR_K_TENSOR, weight->second.id);
    }
    line.close_object();
}

// the lists of a node: each calls `add` with every number

const auto ne_of = [](const ggml_tensor * t, auto && add) {
    for (size_t i = 0; i < n_dims(t); i++) {
        add(t->ne[i]);
    }
};

const auto nb_of = [](const ggml_tensor * t, auto && add) {
    for (size_t i = 0; i < n_dims(t); i++) {
        add(t->nb[i]);
    }
};

const auto params_of = [](const ggml_tensor * t, auto && add) {
    for (size_t i = 0; i < n_params(t); i++) {
        add(t->op_params[i]);
    }
};

template <typename F> void write_lists(json_line & line, const char * key, ggml_cgraph * gf, F list) {
    line.array(key);
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        line.inner_array();
        list(ggml_graph_node(gf, i), [&line](auto number) { line.item(number); });
        line.close_array();
    }
    line.close_array();
}

// a column in which few values repeat: each value as JSON, in the order of their first nodes, and for every node the
// place of its value
struct coded_column {
    std::vector<std::string> values;
    std::vector<size_t>      at;

    template <typename F> coded_column(ggml_cgraph * gf, F text) {
        std::unordered_map<std::string, size_t> places;
        for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
            const auto found = places.emplace(text(ggml_graph_node(gf, i)), values.size());
            if (found.second) {
                values.push_back(found.first->first);
            }
            at.push_back(found.first->second);
        }
    }

    uint64_t digest_of_places() const {
        digest found;
        for (const size_t place : at) {
            found.add(place);
        }
        return found.value;
    }

    // without the places of another graph if they are the same
    void write(json_line & line, const char * key, bool same_places) const {
        line.object(key).array(LLAMA_INSTR_K_VALUES);
        for (const std::string & value : values) {
            line.item_json(value);
        }
        line.close_array();
        if (!same_places) {
            line.column(LLAMA_INSTR_K_AT, at.size(), [this](size_t i) { return at[i]; });
        }
        line.close_object();
    }
};

template <typename F> coded_column coded_lists(ggml_cgraph * gf, F list) {
    return coded_column(gf, [&list](const ggml_tensor * t) {
        std::string text = "[";
        list(t, [&text](auto number) { text += (text.size() > 1 ? "," : "") + std::to_string(number); });
        return text + "]";
    });
}

template <typename F> coded_column coded_names(ggml_cgraph * gf, F name) {
    return coded_column(gf, [&name](const ggml_tensor * t) { return std::string("\"") + name(t) + "\""; });
}

// the columns of nodes in which graphs of one topology differ
struct shape_columns {
    coded_column ne, bytes, params, nb;

    explicit shape_columns(ggml_cgraph * gf) :
        ne(coded_lists(gf, ne_of)), bytes(gf, [](const ggml_tensor * t) { return std::to_string(ggml_nbytes(t)); }),
        params(coded_lists(gf, params_of)), nb(coded_lists(gf, nb_of)) {}

    // calls `f` with the key of each column, the column, and its digests
    template <typename F> void each(F f) const {
        f(LLAMA_INSTR_K_NE, ne, &graph_digests::ne);
        f(LLAMA_INSTR_K_BYTES, bytes, &graph_digests::bytes);
        f(LLAMA_INSTR_K_PARAMS, params, &graph_digests::params);
        f(LLAMA_INSTR_K_NB, nb, &graph_digests::nb);
    }
};

// the columns of nodes; `shapes` are in `changes` unless the graph is of a dry run, which readers take by itself
void write_nodes(json_line & line, const shape_columns & shapes, ggml_cgraph * gf, graph_index & index, const std::vector<int32_t> & layers, bool strides, bool is_dry) {
    const size_t n = (size_t) ggml_graph_n_nodes(gf);
    const auto node = [gf](size_t i) { return ggml_graph_node(gf, (int) i); };
    const auto op   = [](const ggml_tensor * t) { return ggml_op_name(t->op); };
    const auto type = [](const ggml_tensor * t) { return ggml_type_name(t->type); };
    line.object(LLAMA_INSTR_K_NODES);
    line.column(LLAMA_INSTR_K_NAME,  n, [&](size_t i) { return (const char *) node(i)->name; });
    line.column(LLAMA_INSTR_K_LAYER, n, [&](size_t i) { return layers[i]; });
    write_lists(line, LLAMA_INSTR_K_SRC, gf, [&index](const ggml_tensor * t, auto && add) {
        for (const ggml_tensor * src : t->src) {
            if (src) {
                add(index.source_id(src));
            }
        }
    });
    line.column(LLAMA_INSTR_K_BUFFER, n, [&](size_t i) { return index.buffer_id(node(i)); });
    line.column(LLAMA_INSTR_K_EXEC, n, [&](size_t i) { return ggml_instr_node_runs(node(i)) ? 1 : 0; });
    if (is_dry) {
        line.column(LLAMA_INSTR_K_OP,   n, [&](size_t i) { return op(node(i)); });
        line.column(LLAMA_INSTR_K_TYPE, n, [&](size_t i) { return type(node(i)); });
        write_lists(line, LLAMA_INSTR_K_NE, gf, ne_of);
        line.column(LLAMA_INSTR_K_BYTES, n, [&](size_t i) { return ggml_nbytes(node(i)); });
        write_lists(line, LLAMA_INSTR_K_PARAMS, gf, params_of);
        if (strides) {
            write_lists(line, LLAMA_INSTR_K_NB, gf, nb_of);
        }
        line.close_object();
        return;
    }
    line.close_object().object(LLAMA_INSTR_K_CHANGES);
    coded_names(gf, op).write(line, LLAMA_INSTR_K_OP, false);
    coded_names(gf, type).write(line, LLAMA_INSTR_K_TYPE, false);
    shapes.each([&](const char * key, const coded_column & column, column_digests graph_digests::* of) {
        if (strides || of != &graph_digests::nb) {
            column.write(line, key, false);
        }
    });
    line.close_object();
}

// what differs from a graph of the same topology
void write_changes(json_line & line, const shape_columns & shapes, const graph_index & index, const model_state & model, const graph_digests & now, const graph_state & like, bool strides) {
    std::vector<size_t> changed;
    for (size_t i = 0; i < now.leafs.size(); i++) {
        if (now.leafs[i] != like.digests.leafs[i]) {
            changed.push_back(i);
        }
    }
    line.kv(LLAMA_INSTR_K_LIKE, like.id);
    line.column(LLAMA_INSTR_K_LEAFS_AT, changed.size(), [&changed](size_t i) { return changed[i]; });
    line.array(LLAMA_INSTR_K_LEAFS);
    for (const size_t i : changed) {
        write_leaf(line, index.leafs[i], model, false);
    }
    line.close_array().object(LLAMA_INSTR_K_CHANGES);
    shapes.each([&](const char * key, const coded_column & column, column_digests graph_digests::* of) {
        if ((now.*of).values != (like.digests.*of).values && (strides || of != &graph_digests::nb)) {
            column.write(line, key, (now.*of).places == (like.digests.*of).places);
        }
    });
    line.close_object();
}

void write_splits_of_graph(json_line & line, const std::vector<graph_split> & splits) {
    line.array(LLAMA_INSTR_K_SPLITS);
    for (const auto & split : splits) {
        line.object().kv(LLAMA_INSTR_K_START, split.start).kv(LLAMA_INSTR_K_END, split.end);
        line.kv(LLAMA_INSTR_K_BACKEND, ggml_backend_name(split.backend)).close_object();
    }
    line.close_array();
}

// the kept graph of the same topology that has the most in common; nullptr if there is none
const graph_state * closest(const context_state & state, const graph_digests & now) {
    const graph_state * found = nullptr;
    int best = -1;
    for (const auto & known : state.graphs) {
        int common = 0;
        for (const auto of : { &graph_digests::ne, &graph_digests::bytes, &graph_digests::params, &graph_digests::nb }) {
            common += (now.*of).values == (known->digests.*of).values ? 2 : (now.*of).places == (known->digests.*of).places;
        }
        if (known->written && known->digests.topology == now.topology && common >= best) {
            found = known.get();
            best  = common;
        }
    }
    return found;
}

void write_graph(log_part & s, context_state & state, graph_state & graph, ggml_cgraph * gf, graph_index & index, const char * why) {
    const int n_nodes = ggml_graph_n_nodes(gf);
    int n_exec = 0;
    for (int i = 0; i < n_nodes; i++) {
        n_exec += ggml_instr_node_runs(ggml_graph_node(gf, i));
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_GRAPH, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_GRAPH, graph.id).kv(LLAMA_INSTR_K_CTX, state.id).kv(LLAMA_INSTR_K_UID, graph.uid);
    line.kv(LLAMA_INSTR_K_SOURCE, graph.source).kv(LLAMA_INSTR_K_WHY, why);
    line.kv(LLAMA_INSTR_K_N_NODES, n_nodes).kv(LLAMA_INSTR_K_N_EXEC, n_exec);
    write_splits_of_graph(line, splits_of(state, gf));
    if (s.detail != level::minimal) {
        const bool strides = s.detail == level::verbose;
        const model_state & model = model_of(s, state);
        const shape_columns shapes(gf);
        shapes.each([&graph](const char *, const coded_column & column, column_digests graph_digests::* of) {
            (graph.digests.*of).places = column.digest_of_places();
        });
        // a dry run asks for few graphs, each whole
        const bool is_dry = strcmp(graph.source, "reserve") == 0;
        if (const graph_state * like = is_dry ? nullptr : closest(state, graph.digests)) {
            write_changes(line, shapes, index, model, graph.digests, *like, strides);
        } else {
            line.column(LLAMA_INSTR_K_BUFFERS, index.buffers.size(), [&](size_t i) { return index.buffers[i]; });
            line.array(LLAMA_INSTR_K_LEAFS);
            for (const ggml_tensor * leaf : index.leafs) {
                write_leaf(line, leaf, model, is_dry);
            }
            line.close_array();
            write_nodes(line, shapes, gf, index, graph.layers, strides, is_dry);
        }
    }
    const std::string_view text = line.end();
    graph.written = text.size() <= LLAMA_INSTR_MAX_LINE;
    s.log.write(LLAMA_INSTR_EV_GRAPH, text);
}

std::vector<int32_t> layers_of(ggml_cgraph * gf, const std::unordered_map<const ggml_tensor *, int> * built_layers) {
    std::vector<int32_t> layers;
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        const ggml_tensor * node  = ggml_graph_node(gf, i);
        const int           layer = layer_of_node(node, built_layers);
        // some models build a norm without a layer, and name only the product with its weight
        if (i > 0 && layers.back() < 0 && is_norm_of(ggml_graph_node(gf, i - 1), node)) {
            layers.back() = layer;
        }
        layers.push_back(layer);
    }
    return layers;
}

// Of the nodes that read the same ids, the first stands for all. A copy that a scheduler makes of ids is read in their place.
shared_experts experts_of(ggml_cgraph * gf) {
    std::vector<ggml_instr_experts> found;
    std::unordered_set<const ggml_tensor *> known;
    int32_t offset = 0;
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        // a client of a server may send anything
        const bool is_sound = node->op == GGML_OP_MUL_MAT_ID && node->src[0] && node->src[2] && node->src[0]->ne[2] <= LLAMA_INSTR_MAX_EXPERTS;
        if (is_sound && ggml_instr_node_runs(node) && known.insert(node->src[2]).second) {
            const auto n = (int32_t) node->src[0]->ne[2];
            found.push_back({ i, n, offset });
            offset += n;
        }
    }
    return std::make_shared<const std::vector<ggml_instr_experts>>(std::move(found));
}

}  // namespace

graph_state & graph_of(log_part & s, context_state & state, ggml_cgraph * gf, const char * source, bool is_update, const std::unordered_map<const ggml_tensor *, int> * built_layers) {
    auto graph = std::make_unique<graph_state>();
    graph->uid    = ggml_instr_graph_uid(gf);
    graph->source = source;
    graph->layers = layers_of(gf, built_layers);
    graph->experts = s.detail == level::minimal ? std::make_shared<const std::vector<ggml_instr_experts>>() : experts_of(gf);
    const auto splits = splits_of(state, gf);
    graph->n_splits      = (int) splits.size();
    graph->splits_matter = state.has_device || graph->n_splits > 1;
    graph_index index(gf);
    graph->digests = digests_of(gf, index, graph->layers, model_of(s, state), splits);

    auto & graphs = state.graphs;
    // the graph of a dry run has no compute, by which readers would know that it was used
    const bool is_dry = strcmp(source, "reserve") == 0;
    const auto same = std::find_if(graphs.rbegin(), graphs.rend(), [&](const auto & known) { return !is_dry && known->is_same(*graph); });
    if (same != graphs.rend()) {
        (*same)->uid = graph->uid;
        std::rotate(std::prev(same.base()), same.base(), graphs.end());
    } else {
        graph->id = s.all->next_graph++;
        graph->device_plans = std::make_shared<device_plan_table>(graph->id);
        const char * why = is_update ? "memory_update" : state.graphs_known ? "changed" : "first";
        write_graph(s, state, *graph, gf, index, why);
        graphs.push_back(std::move(graph));
        if (graphs.size() > most_graphs) {
            graphs.erase(graphs.begin());
        }
    }
    if (state.ctx) {
        write_memory_if_changed(s, state);
    }
    if (!is_update) {
        state.graphs_known = true;
    }
    return *graphs.back();
}

}  // namespace llama_instr
