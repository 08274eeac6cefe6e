// llama-instrumentation-models.cpp - models and contexts: what they are, written when a part of a log meets them

#include "llama-instrumentation-models.h"

#include "llama-instrumentation-machine.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-session.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-model.h"

#include <cstring>
#include <map>

namespace llama_instr {

namespace {

// Facts that llama.cpp does not keep, for sessions that begin later. Never destroyed, like the recorder's
// globals. They have their own mutex, because a part asks for them while it holds its own.
struct fact_table {
    std::mutex mutex;
    std::unordered_map<const llama_model *, model_load>      loads;
    std::unordered_map<const llama_context *, context_facts> contexts;
    std::unordered_map<const llama_context *, std::string>   adapters;
    std::unordered_map<const llama_adapter_lora *, std::string> files;
};

fact_table & facts() {
    static fact_table * table = new fact_table;
    return *table;
}

}  // namespace

std::mutex & facts_mutex() {
    return facts().mutex;
}

void keep_fact(const llama_model * model, const model_load & load) {
    auto & f = facts();
    std::lock_guard<std::mutex> lock(f.mutex);
    f.loads[model] = load;
}

void keep_fact(const llama_context * ctx, const context_facts & known) {
    auto & f = facts();
    std::lock_guard<std::mutex> lock(f.mutex);
    f.contexts[ctx] = known;
}

void keep_fact(const llama_context * ctx, const std::string & adapters) {
    auto & f = facts();
    std::lock_guard<std::mutex> lock(f.mutex);
    f.adapters[ctx] = adapters;
}

void keep_fact(const llama_adapter_lora * adapter, const std::string & path) {
    auto & f = facts();
    std::lock_guard<std::mutex> lock(f.mutex);
    f.files[adapter] = path.substr(path.rfind('/') + 1);
}

void forget_facts(const void * what) {
    auto & f = facts();
    std::lock_guard<std::mutex> lock(f.mutex);
    f.adapters.erase((const llama_context *) what);
    f.files.erase((const llama_adapter_lora *) what);
    f.loads.erase((const llama_model *) what);
    f.contexts.erase((const llama_context *) what);
    for (auto & entry : f.contexts) {
        if (entry.second.target == what) {
            entry.second.target = nullptr;
        }
    }
}

model_load load_of(const llama_model * model) {
    auto & f = facts();
    std::lock_guard<std::mutex> lock(f.mutex);
    const auto it = f.loads.find(model);
    return it == f.loads.end() ? model_load() : it->second;
}

context_facts facts_of(const llama_context * ctx) {
    auto & f = facts();
    std::lock_guard<std::mutex> lock(f.mutex);
    const auto it = f.contexts.find(ctx);
    return it == f.contexts.end() ? context_facts() : it->second;
}

context_state * model_table::find(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = contexts.find(ctx);
    return it == contexts.end() ? nullptr : it->second.get();
}

context_state * model_table::find_by_memory(llama_memory_t mem) {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto & entry : contexts) {
        if (entry.first->get_memory() == mem) {
            return entry.second.get();
        }
    }
    for (const auto & entry : followed) {
        if (entry.first->get_memory() == mem) {
            return &context_locked(entry.first);
        }
    }
    return nullptr;
}

void model_table::add_cache(context_state & state, const cache_state & cache) {
    std::lock_guard<std::mutex> lock(mutex);
    state.caches.push_back(cache);
}

void model_table::follow(model_table & previous) {
    std::lock_guard<std::mutex> lock(previous.mutex);
    followed = previous.followed;
    for (const auto & entry : previous.contexts) {
        followed[entry.first] = entry.second->caches;
    }
}

int context_state::sequence_of(int output) const {
    if (output >= 0) {
        return (size_t) output < sampled.size() ? sampled[(size_t) output].seq : -1;
    }
    for (auto token = sampled.rbegin(); token != sampled.rend(); ++token) {
        if (token->output && ++output == 0) {
            return token->seq;
        }
    }
    return -1;
}

context_state & model_table::of(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = contexts.find(ctx);
    return it != contexts.end() ? *it->second : context_locked(ctx);
}

bool has_memory(ggml_backend_dev_t dev) {
    return dev && (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU ||
                   ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU);
}

// a server would have to be asked, in the middle of a compute
static bool is_of_other_machine(ggml_backend_dev_t dev) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") == 0;
}

std::unique_ptr<context_state> model_table::new_state() const {
    auto made = std::make_unique<context_state>();
    made->sink.use_counter = ggml_instr_has_counter();
    made->sink.record_wait = s.detail == level::verbose;
    made->sink.recorder    = s.detail == level::minimal ? nullptr : &device_recorder;
    return made;
}

context_state & model_table::of_server() {
    std::lock_guard<std::mutex> lock(mutex);
    auto & slot = servers[std::this_thread::get_id()];
    if (!slot) {
        slot = new_state();
    }
    return *slot;
}

context_state & model_table::context_locked(const llama_context * ctx) {
    auto & slot = contexts[ctx];
    if (!slot) {
        const int model_id = model_locked(&ctx->get_model()).id;
        slot = new_state();
        const auto known = followed.find(ctx);
        if (known != followed.end()) {
            slot->caches = std::move(known->second);
            followed.erase(known);
        }
        slot->ctx = ctx;
        slot->id  = s.all->id_of(ctx);
        ggml_backend_sched_t sched = ctx->get_sched();
        for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); i++) {
            ggml_backend_dev_t dev = ggml_backend_get_device(ggml_backend_sched_get_backend(sched, i));
            slot->has_device = slot->has_device || has_memory(dev);
        }
        write_context(*slot, model_id);
        write_memory_if_changed(s, *slot);
        write_adapters_if_changed(s, *slot);
    }
    return *slot;
}

model_state & model_table::of(const llama_model * model) {
    std::lock_guard<std::mutex> lock(mutex);
    return model_locked(model);
}

void model_table::forget(const void * what) {
    std::lock_guard<std::mutex> lock(mutex);
    contexts.erase((const llama_context *) what);
    followed.erase((const llama_context *) what);
    models.erase((const llama_model *) what);
    s.all->forget(what);
}

namespace {

// blk.12.attn_q.weight -> 12; enc.blk. and dec.blk. count their own
int layer_of_weight(const std::string & name) {
    const size_t at = name.find("blk.");
    if (at == std::string::npos || (at > 0 && name[at - 1] != '.')) {
        return -1;
    }
    char * end = nullptr;
    const long layer = strtol(name.c_str() + at + 4, &end, 10);
    return end != name.c_str() + at + 4 && *end == '.' ? (int) layer : -1;
}

void write_weight(log_part & s, int model_id, int id, const std::string & name, const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_TENSOR, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MODEL, model_id).kv(LLAMA_INSTR_K_TENSOR, id).kv(LLAMA_INSTR_K_NAME, name);
    line.kv(LLAMA_INSTR_K_TYPE, ggml_type_name(t->type));
    line.column(LLAMA_INSTR_K_NE, (size_t) ggml_n_dims(t), [t](size_t i) { return t->ne[i]; });
    line.kv(LLAMA_INSTR_K_BYTES, ggml_nbytes(t));
    line.kv(LLAMA_INSTR_K_BUFFER, buffer ? ggml_backend_buffer_name(buffer) : "");
    line.kv_if_known(LLAMA_INSTR_K_LAYER, layer_of_weight(name));
    s.write(LLAMA_INSTR_EV_TENSOR, line);
}

// a file or a program may claim anything; JSON has no infinity
void write_finite(json_line & line, const char * key, float v) {
    if (std::isfinite(v)) {
        line.kv(key, v);
    }
}

void write_hparams(json_line & line, const llama_model & model) {
    const llama_hparams & hp = model.hparams;
    line.object(LLAMA_INSTR_K_HPARAMS);
    line.kv("n_vocab", model.vocab.n_tokens()).kv("n_ctx_train", hp.n_ctx_train);
    line.kv("n_layer", hp.n_layer()).kv("n_embd", hp.n_embd);
    if (hp.n_layer() > 0) {  // a model that is only a vocabulary has no layers, and asking for their sizes would abort
        line.kv("n_head", hp.n_head()).kv("n_head_kv", hp.n_head_kv());
        line.kv("n_embd_head_k", hp.n_embd_head_k()).kv("n_embd_head_v", hp.n_embd_head_v());
        line.kv("n_rot", hp.n_rot()).kv("n_ff", hp.n_ff());
    }
    line.kv("n_swa", hp.n_swa);
    line.kv("n_expert", hp.n_expert).kv("n_expert_used", hp.n_expert > 0 ? hp.n_expert_used_max() : 0);
    write_finite(line, "rope_freq_base", hp.rope_freq_base_train);
    write_finite(line, "norm_rms_eps", hp.f_norm_rms_eps);
    line.close_object();
}

}  // namespace

model_state & model_table::model_locked(const llama_model * model) {
    auto & slot = models[model];
    if (slot) {
        return *slot;
    }
    slot = std::make_unique<model_state>();
    slot->id = s.all->id_of(model);

    const model_load load = load_of(model);
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_MODEL, load.t_begin ? load.t_begin : ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MODEL, slot->id).kv(LLAMA_INSTR_K_PATH, load.path);
    line.kv(LLAMA_INSTR_K_ARCH, model->arch_name()).kv(LLAMA_INSTR_K_NAME, model->name);
    line.kv(LLAMA_INSTR_K_DESCRIPTION, model->desc());
    line.kv(LLAMA_INSTR_K_PARAMS, model->n_elements()).kv(LLAMA_INSTR_K_BYTES, model->size());
    line.kv(LLAMA_INSTR_K_FTYPE, llama_ftype_name(model->ftype()));
    write_hparams(line, *model);
    line.kv(LLAMA_INSTR_K_DUR, load.dur).kv(LLAMA_INSTR_K_N_TENSORS, model->tensors_by_name.size());
    if (model->hparams.no_alloc) {
        line.kv(LLAMA_INSTR_K_DRY, true);
    }
    s.write(LLAMA_INSTR_EV_MODEL, line);

    for (const auto & entry : model->tensors_by_name) {
        const int id = (int) slot->weights.size();
        // a tensor with two names is one weight; programs load a model without its weights before the one that is used
        const bool is_new = slot->weights.emplace(entry.second, weight_state { id, entry.first == entry.second->name }).second;
        if (is_new && (!model->hparams.no_alloc || s.detail == level::verbose)) {
            write_weight(s, slot->id, id, entry.first, entry.second);
        }
    }
    return *slot;
}

void model_table::write_context(const context_state & state, int model_id) {
    const llama_context * ctx = state.ctx;
    const llama_cparams & cp  = ctx->get_cparams();
    const context_facts known = facts_of(ctx);
    const int target_id = known.target ? context_locked(known.target).id : -1;
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_CONTEXT, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_CTX, state.id).kv(LLAMA_INSTR_K_MODEL, model_id);
    line.kv_if_known(LLAMA_INSTR_K_TARGET, target_id);
    line.kv(LLAMA_INSTR_K_N_CTX, cp.n_ctx).kv(LLAMA_INSTR_K_N_CTX_SEQ, cp.n_ctx_seq);
    line.kv(LLAMA_INSTR_K_N_BATCH, cp.n_batch).kv(LLAMA_INSTR_K_N_UBATCH, cp.n_ubatch);
    line.kv(LLAMA_INSTR_K_N_SEQ_MAX, cp.n_seq_max);
    line.kv(LLAMA_INSTR_K_N_THREADS, cp.n_threads).kv(LLAMA_INSTR_K_N_THREADS_BATCH, cp.n_threads_batch);
    line.kv(LLAMA_INSTR_K_TYPE_K, ggml_type_name(known.type_k)).kv(LLAMA_INSTR_K_TYPE_V, ggml_type_name(known.type_v));
    line.kv(LLAMA_INSTR_K_FLASH_ATTN, cp.flash_attn).kv(LLAMA_INSTR_K_CAUSAL, cp.causal_attn);
    line.kv(LLAMA_INSTR_K_EMBEDDINGS, cp.embeddings).kv(LLAMA_INSTR_K_KV_UNIFIED, cp.kv_unified);
    line.kv(LLAMA_INSTR_K_OFFLOAD_KQV, cp.offload_kqv);
    line.array(LLAMA_INSTR_K_BACKENDS);
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); i++) {
        line.item(ggml_backend_name(ggml_backend_sched_get_backend(sched, i)));
    }
    line.close_array();
    s.write(LLAMA_INSTR_EV_CONTEXT, line);
}

std::string memory_json(const llama_context * ctx) {
    // sorted by name: the map is ordered by address
    std::map<std::string, llama_memory_breakdown_data> by_name;
    std::map<std::string, const char *> device_of;
    for (const auto & entry : ctx->memory_breakdown()) {
        const char * name = ggml_backend_buft_name(entry.first);
        auto & sum = by_name[name];
        sum.model   += entry.second.model;
        sum.context += entry.second.context;
        sum.compute += entry.second.compute;
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(entry.first);
        if (has_memory(dev) && !ggml_backend_buft_is_host(entry.first)) {
            device_of[name] = ggml_backend_dev_name(dev);
        }
    }
    json_line line;
    line.inner_array();
    for (const auto & entry : by_name) {
        line.object().kv(LLAMA_INSTR_K_BUFFER, entry.first);
        if (const auto of = device_of.find(entry.first); of != device_of.end()) {
            line.kv(LLAMA_INSTR_K_DEVICE, of->second);
        }
        line.kv(LLAMA_INSTR_K_MODEL, entry.second.model);
        line.kv(LLAMA_INSTR_K_CONTEXT, entry.second.context).kv(LLAMA_INSTR_K_COMPUTE, entry.second.compute).close_object();
    }
    return std::string(line.close_array().lines());
}

void write_memory_if_changed(log_part & s, context_state & state) {
    const std::string now = memory_json(state.ctx);
    if (now == state.memory) {
        return;
    }
    state.memory = now;
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_MEMORY, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_CTX, state.id).kv_json(LLAMA_INSTR_K_BUFFERS, now.c_str());
    if (state.has_device) {
        line.array(LLAMA_INSTR_K_DEVICES);
        ggml_backend_sched_t sched = state.ctx->get_sched();
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
            ggml_backend_dev_t dev = ggml_backend_get_device(ggml_backend_sched_get_backend(sched, i));
            if (has_memory(dev) && !is_of_other_machine(dev)) {
                size_t free = 0, total = 0;
                ggml_backend_dev_memory(dev, &free, &total);
                line.object().kv(LLAMA_INSTR_K_DEVICE, ggml_backend_dev_name(dev));
                line.kv(LLAMA_INSTR_K_TOTAL, total).kv(LLAMA_INSTR_K_FREE, free).close_object();
            }
        }
        line.close_array();
    }
    line.kv(LLAMA_INSTR_K_RSS, resident_bytes());
    s.write(LLAMA_INSTR_EV_MEMORY, line);
}

std::string adapters_json(const std::unordered_map<llama_adapter_lora *, float> & scales) {
    std::multimap<std::string, std::pair<const llama_adapter_lora *, float>> by_file;
    {
        auto & f = facts();
        std::lock_guard<std::mutex> lock(f.mutex);
        for (const auto & entry : scales) {
            const auto file = f.files.find(entry.first);
            by_file.emplace(file == f.files.end() ? "" : file->second, entry);
        }
    }
    json_line line;
    line.inner_array();
    for (const auto & entry : by_file) {
        const llama_adapter_lora & adapter = *entry.second.first;
        const auto name = adapter.gguf_kv.find("general.name");
        int64_t rank  = 0;
        size_t  bytes = 0;
        for (const auto & pair : adapter.ab_map) {
            rank = std::max(rank, pair.second.b->ne[0]);
            bytes += ggml_nbytes(pair.second.a) + ggml_nbytes(pair.second.b);
        }
        line.object().kv(LLAMA_INSTR_K_FILE, entry.first);
        line.kv(LLAMA_INSTR_K_NAME, name == adapter.gguf_kv.end() ? "" : name->second);
        line.kv(LLAMA_INSTR_K_RANK, rank).kv(LLAMA_INSTR_K_N_WEIGHTS, adapter.ab_map.size()).kv(LLAMA_INSTR_K_BYTES, bytes);
        write_finite(line, LLAMA_INSTR_K_ALPHA, adapter.alpha);
        write_finite(line, LLAMA_INSTR_K_SCALE, entry.second.second);
        line.close_object();
    }
    return std::string(line.close_array().lines());
}

void write_adapters_if_changed(log_part & s, context_state & state) {
    std::string now = "[]";
    {
        auto & f = facts();
        std::lock_guard<std::mutex> lock(f.mutex);
        const auto known = f.adapters.find(state.ctx);
        now = known == f.adapters.end() ? now : known->second;
    }
    if (now == state.adapters) {
        return;
    }
    state.adapters = now;
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_ADAPTERS, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_CTX, state.id).kv_json(LLAMA_INSTR_K_ADAPTERS, now.c_str());
    s.write(LLAMA_INSTR_EV_ADAPTERS, line);
}

}  // namespace llama_instr
