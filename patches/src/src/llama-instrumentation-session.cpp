// llama-instrumentation-session.cpp - opens and closes the session, and introduces contexts and models

#include "llama-instrumentation-session.h"

#include "llama-instrumentation.h"
#include "llama-instrumentation-build.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-model.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <pthread.h>
#include <unistd.h>

std::atomic<bool> llama_instr_on { false };

namespace llama_instr {

namespace {

// Never destroyed: threads of the application may still decode while the process ends.
struct global_state {
    std::mutex mutex;
    std::shared_ptr<session> open;
    bool environment_asks = false;
    int  closing = 0;  // sessions that wait for the steps under way, whose hooks must go on

    // the hooks' flag; with the mutex held
    void update_flag() { llama_instr_on = open != nullptr || environment_asks || closing > 0; }

    // facts that llama.cpp does not keep, for sessions that begin later; a mutex of their own, since a
    // session asks for them while it holds its own
    std::mutex facts_mutex;
    std::unordered_map<const llama_model *, model_load>      loads;
    std::unordered_map<const llama_context *, context_types> types;
};

global_state & global() {
    static global_state * state = new global_state;
    return *state;
}

thread_local std::string last_error;

int fail(int code, const std::string & text) {
    last_error = text;
    return -code;
}

const char * level_names[] = { "minimal", "detailed", "verbose" };

std::string environment(const char * name) {
    const char * value = getenv(name);
    return value ? value : "";
}

std::string replace_pid(std::string path) {
    for (size_t at; (at = path.find("%p")) != std::string::npos;) {
        path.replace(at, 2, std::to_string(getpid()));
    }
    return path;
}

// session.log -> session.1234.log
std::string with_pid(const std::string & path) {
    const size_t slash = path.find_last_of('/');
    const size_t dot   = path.find_last_of('.');
    const bool   has_suffix = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1);
    const size_t at = has_suffix ? dot : path.size();
    return path.substr(0, at) + "." + std::to_string(getpid()) + path.substr(at);
}

int open_session(const std::string & path, const std::string & level_name, const std::string & args, const std::string & stats, int32_t flags) {
    auto & g = global();
    if (g.open) {
        return fail(EBUSY, "a session is open already; a process records one at a time");
    }
    auto s = std::make_shared<session>();
    if (!parse_level(level_name.c_str(), s->detail)) {
        return fail(EINVAL, "unknown level '" + level_name + "'; it is minimal, detailed or verbose");
    }
    s->flags         = flags;
    s->stats_pattern = stats;
    try {
        s->stats = std::regex(stats);
    } catch (const std::regex_error & err) {
        return fail(EINVAL, "not a regular expression: '" + stats + "': " + err.what());
    }
    const int status = s->log.open(path.c_str(), (flags & LLAMA_INSTR_OVERWRITE) != 0);
    if (status != 0) {
        return fail(-status, path + ": " + strerror(-status));
    }
    write_session_start(*s, args.c_str());
    s->log.flush();
    g.open = s;
    g.update_flag();
    return 0;
}

void open_from_environment() {
    auto & g = global();
    g.environment_asks = false;
    g.update_flag();

    std::string path = replace_pid(environment("LLAMA_INSTR_LOG"));
    std::string level_name = environment("LLAMA_INSTR_LEVEL");
    if (level_name.empty()) {
        level_name = "detailed";
    }
    const bool stop = environment("LLAMA_INSTR_ON_ERROR") == "stop";
    const int32_t flags = stop ? LLAMA_INSTR_STOP_ON_ERROR : 0;

    int status = open_session(path, level_name, environment("LLAMA_INSTR_ARGS"), environment("LLAMA_INSTR_STATS"), flags);
    if (status == -EEXIST) {
        const std::string other = with_pid(path);
        fprintf(stderr, "llama-instr: %s exists; recording to %s\n", path.c_str(), other.c_str());
        status = open_session(other, level_name, environment("LLAMA_INSTR_ARGS"), environment("LLAMA_INSTR_STATS"), flags);
    }
    if (status != 0) {
        fprintf(stderr, "llama-instr: nothing is recorded: %s\n", last_error.c_str());
        if (stop) {
            _exit(74);  // EX_IOERR of sysexits.h
        }
    }
}

int close_session(const char * reason, bool wait) {
    auto & g = global();
    std::shared_ptr<session> s;
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        if (!g.open) {
            return fail(ENOENT, "no session is open");
        }
        s.swap(g.open);
        g.closing++;
    }
    if (wait) {
        s->wait_for_steps();
    }
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        g.closing--;
        g.update_flag();
    }
    const int status = s->log.close([&](const log_file::totals & totals) {
        json_line line;
        line.begin(LLAMA_INSTR_EV_SESSION_END, ggml_instr_clock_ns());
        line.kv(LLAMA_INSTR_K_REASON, reason);
        line.object(LLAMA_INSTR_K_EVENTS);
        for (const auto & count : totals.events) {
            if (count.lines > 0) {
                line.kv(count.event, count.lines);
            }
        }
        line.close_object();
        line.kv(LLAMA_INSTR_K_BYTES, totals.bytes);
        line.kv(LLAMA_INSTR_K_DROPPED, totals.dropped);
        line.kv(LLAMA_INSTR_K_DROPPED_OPS, s->dropped_ops.load());
        line.kv(LLAMA_INSTR_K_DECODE_NS, s->decode_ns.load());
        line.kv(LLAMA_INSTR_K_OVERHEAD_NS, s->overhead_ns.load());
        return line.end();
    });
    return status == 0 ? 0 : fail(-status, std::string("the log is not complete: ") + strerror(-status));
}

void at_exit() {
    if (llama_instr_enabled()) {
        close_session("exit", false);
    }
}

// The child of a fork has its parent's file: it must not write there. It opens a log of its own when the
// environment asks for one.
void in_child() {
    auto & g = global();
    // other threads of the parent may have held these
    new (&g.mutex) std::mutex;
    new (&g.facts_mutex) std::mutex;
    if (g.open) {
        g.open->log.abandon();
        new std::shared_ptr<session>(std::move(g.open));  // never destroyed: its locks may be held for ever
        g.open = nullptr;
    }
    g.closing = 0;
    g.environment_asks = !environment("LLAMA_INSTR_LOG").empty();
    g.update_flag();
}

// runs when the library is loaded
struct startup {
    startup() {
        auto & g = global();
        pthread_atfork(nullptr, nullptr, in_child);
        atexit(at_exit);
        g.environment_asks = !environment("LLAMA_INSTR_LOG").empty();
        g.update_flag();
    }
} startup_instance;

}  // namespace

bool parse_level(const char * text, level & out) {
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, level_names[i]) == 0) {
            out = (level) i;
            return true;
        }
    }
    return false;
}

std::shared_ptr<session> current_session() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    if (!g.open && g.environment_asks) {
        open_from_environment();
    }
    return g.open;
}

std::shared_ptr<session> open_session_or_null() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    return g.open;
}

json_line & line_buffer() {
    thread_local json_line line;
    return line;
}

uint64_t & recorder_clock::spent() {
    thread_local uint64_t ns = 0;
    return ns;
}

model_load load_of(const llama_model * model) {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.facts_mutex);
    const auto it = g.loads.find(model);
    return it == g.loads.end() ? model_load() : it->second;
}

context_types types_of(const llama_context * ctx) {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.facts_mutex);
    const auto it = g.types.find(ctx);
    return it == g.types.end() ? context_types() : it->second;
}

void session::wait_for_steps() {
    // a step that hangs must not hang the end of the session
    std::unique_lock<std::mutex> lock(steps_mutex);
    steps_done.wait_for(lock, std::chrono::seconds(10), [this] { return steps == 0; });
}

// a full disk is told once, and ends the program where that was asked for
void session::after_write() {
    const int error = log.failed();
    if (error == 0 || told_failure.exchange(true)) {
        return;
    }
    const bool stop = (flags & LLAMA_INSTR_STOP_ON_ERROR) != 0;
    fprintf(stderr, "llama-instr: %s cannot be written (%s): %s\n", log.path().c_str(), strerror(error),
            stop ? "stopping, as asked" : "inference goes on, events are dropped and counted");
    if (stop) {
        log.close([](const log_file::totals &) { return std::string(); });
        _exit(74);
    }
}

context_state * session::find(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = contexts.find(ctx);
    return it == contexts.end() ? nullptr : it->second.get();
}

context_state * session::find_by_memory(llama_memory_t mem) {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto & entry : contexts) {
        if (entry.first->get_memory() == mem) {
            return entry.second.get();
        }
    }
    return nullptr;
}

context_state & session::of(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex);
    auto & slot = contexts[ctx];
    if (!slot) {
        const int model_id = model_locked(&ctx->get_model()).id;
        slot = std::make_unique<context_state>();
        slot->ctx = ctx;
        slot->id  = next_ctx++;
        slot->sink.use_counter = ggml_instr_has_counter();
        slot->sink.record_wait = detail == level::verbose;
        ggml_backend_sched_t sched = ctx->get_sched();
        for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); i++) {
            ggml_backend_dev_t dev = ggml_backend_get_device(ggml_backend_sched_get_backend(sched, i));
            slot->has_device = slot->has_device || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU ||
                                                   ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU;
        }
        write_context(*slot, model_id);
        write_memory_if_changed(*this, *slot);
    }
    return *slot;
}

model_state & session::of(const llama_model * model) {
    std::lock_guard<std::mutex> lock(mutex);
    return model_locked(model);
}

void session::forget(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex);
    contexts.erase(ctx);
}

void session::forget(const llama_model * model) {
    std::lock_guard<std::mutex> lock(mutex);
    models.erase(model);
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

void write_weight(session & s, int model_id, int id, const std::string & name, const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_TENSOR, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MODEL, model_id).kv(LLAMA_INSTR_K_TENSOR, id).kv(LLAMA_INSTR_K_NAME, name);
    line.kv(LLAMA_INSTR_K_TYPE, ggml_type_name(t->type));
    line.column(LLAMA_INSTR_K_NE, (size_t) ggml_n_dims(t), [t](size_t i) { return t->ne[i]; });
    line.kv(LLAMA_INSTR_K_BYTES, ggml_nbytes(t));
    line.kv(LLAMA_INSTR_K_BUFFER, buffer ? ggml_backend_buffer_name(buffer) : "");
    const int layer = layer_of_weight(name);
    if (layer >= 0) {
        line.kv(LLAMA_INSTR_K_LAYER, layer);
    }
    s.write(LLAMA_INSTR_EV_TENSOR, line);
}

void write_hparams(json_line & line, const llama_model & model) {
    const llama_hparams & hp = model.hparams;
    line.object(LLAMA_INSTR_K_HPARAMS);
    line.kv("n_vocab", model.vocab.n_tokens()).kv("n_ctx_train", hp.n_ctx_train);
    line.kv("n_layer", hp.n_layer()).kv("n_embd", hp.n_embd);
    line.kv("n_head", hp.n_head()).kv("n_head_kv", hp.n_head_kv());
    line.kv("n_embd_head_k", hp.n_embd_head_k()).kv("n_embd_head_v", hp.n_embd_head_v());
    line.kv("n_rot", hp.n_rot()).kv("n_ff", hp.n_ff()).kv("n_swa", hp.n_swa);
    line.kv("n_expert", hp.n_expert).kv("n_expert_used", hp.n_expert > 0 ? hp.n_expert_used_max() : 0);
    line.kv("rope_freq_base", hp.rope_freq_base_train);
    line.kv("norm_rms_eps", hp.f_norm_rms_eps);
    line.close_object();
}

}  // namespace

model_state & session::model_locked(const llama_model * model) {
    auto & slot = models[model];
    if (slot) {
        return *slot;
    }
    slot = std::make_unique<model_state>();
    slot->id = next_model++;

    const model_load load = load_of(model);
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_MODEL, load.t_begin ? load.t_begin : ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MODEL, slot->id).kv(LLAMA_INSTR_K_PATH, load.path);
    line.kv(LLAMA_INSTR_K_ARCH, model->arch_name()).kv(LLAMA_INSTR_K_NAME, model->name);
    line.kv(LLAMA_INSTR_K_DESCRIPTION, model->desc());
    line.kv(LLAMA_INSTR_K_PARAMS, model->n_elements()).kv(LLAMA_INSTR_K_BYTES, model->size());
    line.kv(LLAMA_INSTR_K_FTYPE, llama_ftype_name(model->ftype()));
    write_hparams(line, *model);
    line.kv(LLAMA_INSTR_K_DUR, load.dur).kv(LLAMA_INSTR_K_N_TENSORS, model->tensors_by_name.size());
    write(LLAMA_INSTR_EV_MODEL, line);

    for (const auto & entry : model->tensors_by_name) {
        const int id = (int) slot->weights.size();
        // a tensor that two names share is one weight
        if (slot->weights.emplace(entry.second, id).second) {
            write_weight(*this, slot->id, id, entry.first, entry.second);
        }
    }
    return *slot;
}

void session::write_context(const context_state & state, int model_id) {
    const llama_context * ctx = state.ctx;
    const llama_cparams & cp  = ctx->get_cparams();
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_CONTEXT, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_CTX, state.id).kv(LLAMA_INSTR_K_MODEL, model_id);
    line.kv(LLAMA_INSTR_K_N_CTX, cp.n_ctx).kv(LLAMA_INSTR_K_N_CTX_SEQ, cp.n_ctx_seq);
    line.kv(LLAMA_INSTR_K_N_BATCH, cp.n_batch).kv(LLAMA_INSTR_K_N_UBATCH, cp.n_ubatch);
    line.kv(LLAMA_INSTR_K_N_SEQ_MAX, cp.n_seq_max);
    line.kv(LLAMA_INSTR_K_N_THREADS, cp.n_threads).kv(LLAMA_INSTR_K_N_THREADS_BATCH, cp.n_threads_batch);
    const context_types types = types_of(ctx);
    line.kv(LLAMA_INSTR_K_TYPE_K, ggml_type_name(types.k)).kv(LLAMA_INSTR_K_TYPE_V, ggml_type_name(types.v));
    line.kv(LLAMA_INSTR_K_FLASH_ATTN, cp.flash_attn).kv(LLAMA_INSTR_K_CAUSAL, cp.causal_attn);
    line.kv(LLAMA_INSTR_K_EMBEDDINGS, cp.embeddings).kv(LLAMA_INSTR_K_KV_UNIFIED, cp.kv_unified);
    line.kv(LLAMA_INSTR_K_OFFLOAD_KQV, cp.offload_kqv);
    line.array(LLAMA_INSTR_K_BACKENDS);
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); i++) {
        line.item(ggml_backend_name(ggml_backend_sched_get_backend(sched, i)));
    }
    line.close_array();
    write(LLAMA_INSTR_EV_CONTEXT, line);
}

std::string memory_json(const llama_context * ctx) {
    json_line line;
    // by name: the order of the map is that of addresses
    std::map<std::string, llama_memory_breakdown_data> by_name;
    for (const auto & entry : ctx->memory_breakdown()) {
        auto & sum = by_name[ggml_backend_buft_name(entry.first)];
        sum.model   += entry.second.model;
        sum.context += entry.second.context;
        sum.compute += entry.second.compute;
    }
    line.begin_array();
    for (const auto & entry : by_name) {
        line.object().kv(LLAMA_INSTR_K_BUFFER, entry.first).kv(LLAMA_INSTR_K_MODEL, entry.second.model);
        line.kv(LLAMA_INSTR_K_CONTEXT, entry.second.context).kv(LLAMA_INSTR_K_COMPUTE, entry.second.compute).close_object();
    }
    return line.end_array();
}

void write_memory_if_changed(session & s, context_state & state) {
    const std::string now = memory_json(state.ctx);
    if (now == state.memory) {
        return;
    }
    state.memory = now;
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_MEMORY, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_CTX, state.id).kv_json(LLAMA_INSTR_K_BUFFERS, now.c_str());
    line.kv(LLAMA_INSTR_K_RSS, resident_bytes());
    s.write(LLAMA_INSTR_EV_MEMORY, line);
}

}  // namespace llama_instr

using namespace llama_instr;

//
// models and contexts come and go
//

llama_instr_model_load::llama_instr_model_load(const char * path_) : path(path_ ? path_ : ""), t_begin(ggml_instr_clock_ns()) {}

void llama_instr_model_load::done(const llama_model * model) {
    {
        auto & g = global();
        std::lock_guard<std::mutex> lock(g.facts_mutex);
        g.loads[model] = { path, t_begin, ggml_instr_clock_ns() - t_begin };
    }
    if (llama_instr_enabled()) {
        if (auto s = current_session()) {
            s->of(model);
        }
    }
}

void llama_instr_model_free(const llama_model * model) {
    auto & g = global();
    {
        std::lock_guard<std::mutex> lock(g.facts_mutex);
        g.loads.erase(model);
    }
    if (auto s = open_session_or_null()) {
        s->forget(model);
    }
}

void llama_instr_context_init(const llama_context * ctx, enum ggml_type type_k, enum ggml_type type_v) {
    {
        auto & g = global();
        std::lock_guard<std::mutex> lock(g.facts_mutex);
        g.types[ctx] = { type_k, type_v };
    }
    if (llama_instr_enabled()) {
        if (auto s = current_session()) {
            s->of(ctx);
        }
    }
}

void llama_instr_context_free(const llama_context * ctx) {
    auto & g = global();
    {
        std::lock_guard<std::mutex> lock(g.facts_mutex);
        g.types.erase(ctx);
    }
    if (auto s = open_session_or_null()) {
        s->forget(ctx);
        s->log.flush();  // a process that ends with _exit() runs nothing of ours after this
    }
}

//
// C API
//

int32_t llama_instr_abi(void) {
    return LLAMA_INSTR_ABI;
}

const char * llama_instr_info(void) {
    static const std::string info = std::string("{\"llama_cpp\":\"" LLAMA_INSTR_BUILD_LLAMA_CPP "\",\"commit\":\"" LLAMA_INSTR_BUILD_COMMIT
        "\",\"patches\":\"" LLAMA_INSTR_BUILD_PATCHES "\",\"abi\":") + std::to_string(LLAMA_INSTR_ABI) + "}";
    return info.c_str();
}

const char * llama_instr_error(void) {
    return last_error.c_str();
}

int32_t llama_instr_begin(const char * path, const char * level, const char * args, const char * stats, int32_t flags) {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    // the program's own word goes before the environment's
    const bool asked = g.environment_asks;
    g.environment_asks = false;
    const int status = open_session(path ? path : "", level ? level : "detailed", args ? args : "", stats ? stats : "", flags);
    if (status != 0) {
        g.environment_asks = asked;
    }
    return status;
}

int32_t llama_instr_end(void) {
    return close_session("closed", true);
}

int32_t llama_instr_status(void) {
    const auto s = open_session_or_null();
    return s ? LLAMA_INSTR_ACTIVE | (s->log.failed() ? LLAMA_INSTR_FAILED : 0) | (s->nan_seen ? LLAMA_INSTR_NAN : 0) : 0;
}

int64_t llama_instr_dropped(void) {
    const auto s = open_session_or_null();
    return s ? (int64_t) s->log.dropped() : 0;
}

int64_t llama_instr_mark(int32_t phase, int64_t id, const char * name) {
    static const char * phases[] = { "begin", "end", "instant" };
    auto s = llama_instr_enabled() ? current_session() : nullptr;
    if (!s || phase < 0 || phase > 2) {
        return -1;
    }
    if (phase != 1) {
        id = s->next_mark++;
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_MARK, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MARK, id).kv(LLAMA_INSTR_K_NAME, name).kv(LLAMA_INSTR_K_PHASE, phases[phase]);
    line.kv(LLAMA_INSTR_K_THREAD, thread_id());
    s->write(LLAMA_INSTR_EV_MARK, line);
    return id;
}

int32_t llama_instr_note(const char * name, const char * json) {
    auto s = llama_instr_enabled() ? current_session() : nullptr;
    if (!s) {
        return -1;
    }
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_NOTE, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_NAME, name).kv_json(LLAMA_INSTR_K_DATA, json);
    s->write(LLAMA_INSTR_EV_NOTE, line);
    return 0;
}

int32_t llama_instr_memory(const struct llama_context * ctx, char * buf, int32_t size) {
    const std::string json = memory_json(ctx);
    if (buf && size > 0) {
        snprintf(buf, (size_t) size, "%s", json.c_str());
    }
    return (int32_t) json.size();
}
