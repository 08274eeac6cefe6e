// llama-instrumentation-models.h - models and contexts: what a part of a log knows of them

#pragma once

#include "llama-instrumentation-graph.h"

#include "ggml-instrumentation.h"
#include "llama.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

class log_part;

// a memory that a context was seen to use
struct cache_state {
    const llama_memory_i * cache;
    bool     recurrent;
    uint64_t bytes;  // of all cells
};

// the sequence of a token of a batch, -1 if it has several, and whether its logits are kept
struct batch_token {
    int  seq;
    bool output;
};

// of a context, or of the graphs that clients send to a server: these have no context, and -1 for its id
struct context_state {
    const llama_context * ctx = nullptr;
    ggml_backend_t backend = nullptr;  // of the latest of these graphs
    std::unordered_map<ggml_backend_t, int> served;  // the latest of these graphs of each backend
    int  id     = -1;
    int  tokens = 0;   // sampled so far
    int  last_step = -1;
    bool graphs_known = false;  // graphs built since the part began; older ones have no layers
    bool has_device   = false;
    std::string memory;           // the last breakdown written
    std::string adapters = "[]";  // the last written
    std::vector<batch_token> sampled;  // the latest batch, which a sampler reads
    std::vector<cache_state> caches;
    std::vector<std::unique_ptr<graph_state>> graphs;  // the latest is the last
    ggml_instr_sink sink = {};

    // the last graph, if it has this uid
    graph_state * last_graph(uint64_t uid) const { return !graphs.empty() && graphs.back()->uid == uid ? graphs.back().get() : nullptr; }

    // the sequence of an output, given as llama_get_logits_ith() takes it; -1 if it is not known
    int sequence_of(int output) const;

    ~context_state() { ggml_instr_sink_free(&sink); }
};

struct weight_state {
    int  id;
    bool same_name;  // as the model's file has it
};

struct model_state {
    int id = -1;
    std::unordered_map<const ggml_tensor *, weight_state> weights;
};

// What one part of a log has met. A context's state is touched only by the thread that uses the context, as llama.cpp demands
// of its contexts anyway.
class model_table {
  public:
    explicit model_table(log_part & s_) : s(s_) {}

    // The state of a context; on its first use here, writes it, its model and its weights to the log.
    context_state & of(const llama_context * ctx);
    // the same, or nullptr if the part has not met the context
    context_state * find(const llama_context * ctx);
    model_state   & of(const llama_model * model);
    // the state of the graphs that clients send to the server of this thread
    context_state & of_server();
    // a model or a context that is freed
    void forget(const void * what);
    context_state * find_by_memory(llama_memory_t mem);
    // only the thread that uses the context adds to its caches
    void add_cache(context_state & state, const cache_state & cache);
    // takes over the contexts of the part before this one, with their caches
    void follow(model_table & previous);

  private:
    log_part & s;
    std::mutex mutex;
    std::unordered_map<const llama_context *, std::unique_ptr<context_state>> contexts;
    std::unordered_map<const llama_model *, std::unique_ptr<model_state>>     models;
    std::unordered_map<std::thread::id, std::unique_ptr<context_state>>       servers;
    std::unordered_map<const llama_context *, std::vector<cache_state>> followed;  // not met yet

    std::unique_ptr<context_state> new_state() const;
    context_state & context_locked(const llama_context * ctx);
    model_state & model_locked(const llama_model * model);
    void write_context(const context_state & state, int model_id);
};

// process-wide facts about a model that a session opened later still needs
struct model_load {
    std::string path;
    uint64_t    t_begin = 0;
    uint64_t    dur     = 0;
};
model_load load_of(const llama_model * model);

struct context_facts {
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    const llama_context * target = nullptr;  // verifies what this one drafts
};
context_facts facts_of(const llama_context * ctx);

void keep_fact(const llama_model * model, const model_load & load);
void keep_fact(const llama_context * ctx, const context_facts & facts);
// the adapters of a context, as `adapters_json` has them
void keep_fact(const llama_context * ctx, const std::string & adapters);
void keep_fact(const llama_adapter_lora * adapter, const std::string & path);
void forget_facts(const void * what);

// guards these facts
std::mutex & facts_mutex();

// llama.cpp's memory breakdown as a JSON array of buffer uses
std::string memory_json(const llama_context * ctx);
// whether a device has memory of its own, or is a GPU that shares the machine's
bool has_memory(ggml_backend_dev_t dev);
void write_memory_if_changed(log_part & s, context_state & state);

// adapters and their scales as a JSON array, by the names of their files
std::string adapters_json(const std::unordered_map<llama_adapter_lora *, float> & scales);
void write_adapters_if_changed(log_part & s, context_state & state);

}  // namespace llama_instr
