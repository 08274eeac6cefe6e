// llama-instrumentation.cpp - the hooks: steps, ubatches, computes, samplers, messages

#include "llama-instrumentation.h"

#include "llama-instrumentation-thread.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <array>
#include <sys/resource.h>

using namespace llama_instr;

namespace llama_instr {

thread_state & tl() {
    thread_local thread_state state;
    return state;
}

}  // namespace llama_instr

//
// steps
//

void llama_instr_step::begin(const llama_context * ctx) {
    auto & step = tl().step;
    if (step.depth > 0) {
        return;  // a callback of the application decodes inside a decode
    }
    const uint64_t spent = recorder_clock::spent();
    recorder_clock recorder;
    auto s = current_session();
    if (!s) {
        return;
    }
    active = true;
    step   = step_state();
    step.depth = 1;
    step.t_begin        = recorder.t_begin;
    step.spent_at_begin = spent;
    step.clock.last     = recorder.t_begin;
    step.clock.spent    = spent;
    step.state = &s->of(ctx);
    step.s     = std::move(s);
    step.s->step_begins();
}

void llama_instr_batch_impl(const llama_context * ctx, const llama_batch_ext & batch, bool encode) {
    auto & step = tl().step;
    if (step.depth == 0 || step.id >= 0 || step.state->ctx != ctx) {
        return;
    }
    recorder_clock recorder;
    const bool output_all = encode || ctx->get_cparams().embeddings;
    std::array<int, LLAMA_MAX_SEQ> tokens_of = {};
    int n_outputs = 0, n_seqs = 0, most = 0;
    llama_pos pos = -1;
    for (const auto & token : batch.tokens) {
        n_outputs += output_all || token.output;
        pos = pos < 0 ? token.pos[0] : std::min(pos, token.pos[0]);
        for (const llama_seq_id seq : token.seq_ids) {
            if (seq >= 0 && seq < LLAMA_MAX_SEQ) {
                n_seqs += tokens_of[(size_t) seq]++ == 0;
                most = std::max(most, tokens_of[(size_t) seq]);
            }
        }
    }
    step.id = step.state->last_step = step.s->next_step++;

    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_STEP_BEGIN, step.t_begin);
    line.kv(LLAMA_INSTR_K_STEP, step.id).kv(LLAMA_INSTR_K_CTX, step.state->id);
    line.kv(LLAMA_INSTR_K_KIND, encode ? "encode" : "decode").kv(LLAMA_INSTR_K_PHASE, most > 1 ? "prefill" : "decode");
    line.kv(LLAMA_INSTR_K_N_TOKENS, batch.tokens.size()).kv(LLAMA_INSTR_K_N_OUTPUTS, n_outputs).kv(LLAMA_INSTR_K_N_SEQS, n_seqs);
    line.kv(LLAMA_INSTR_K_POS, pos).kv(LLAMA_INSTR_K_THREAD, thread_id());
    step.s->write(LLAMA_INSTR_EV_STEP_BEGIN, line);
}

// The process's faults since they were last asked for. Another thread may have asked later and be here
// earlier: then they are told there.
static long faults_since(std::atomic<long> & last, long now) {
    long before = last.load();
    while (before < now && !last.compare_exchange_weak(before, now)) {
    }
    return before < now ? now - before : 0;
}

void llama_instr_step::finish() {
    auto & step = tl().step;
    const uint64_t t_entry = ggml_instr_clock_ns();
    (step.n_ubatch == 0 ? step.prepare : step.readback) += step.clock.lap(t_entry);
    const uint64_t spent = recorder_clock::spent() - step.spent_at_begin;
    rusage usage;  // asked once a step: the call takes as long as formatting a line
    getrusage(RUSAGE_SELF, &usage);

    const uint64_t now = ggml_instr_clock_ns();
    if (step.id >= 0) {
        json_line & line = line_buffer();
        line.begin(LLAMA_INSTR_EV_STEP_END, now);
        line.kv(LLAMA_INSTR_K_STEP, step.id).kv(LLAMA_INSTR_K_STATUS, status);
        line.kv(LLAMA_INSTR_K_N_UBATCH, step.n_ubatch).kv(LLAMA_INSTR_K_N_REUSED, step.n_reused);
        line.kv(LLAMA_INSTR_K_PREPARE, step.prepare).kv(LLAMA_INSTR_K_READBACK, step.readback);
        line.kv(LLAMA_INSTR_K_RECORDER, spent + (now - t_entry));
        line.kv(LLAMA_INSTR_K_MINFLT, faults_since(step.s->minflt, usage.ru_minflt));
        line.kv(LLAMA_INSTR_K_MAJFLT, faults_since(step.s->majflt, usage.ru_majflt));
        step.s->write(LLAMA_INSTR_EV_STEP_END, line);
    }
    step.s->log.flush_if_due(now);
    // the totals, unlike the line, know what the line itself took
    const uint64_t t_exit = ggml_instr_clock_ns();
    step.s->decode_ns   += t_exit - step.t_begin;
    step.s->overhead_ns += spent + (t_exit - t_entry);
    step.s->step_ends();
    step.depth = 0;
    step.s.reset();
}

//
// ubatches
//

void llama_instr_ubatch::begin(const llama_context * ctx, uint32_t n_tokens, bool encoder) {
    auto & step = tl().step;
    auto & ub   = tl().ubatch;
    if (step.depth == 0 || step.state->ctx != ctx) {
        return;
    }
    active = true;
    const uint64_t now = ggml_instr_clock_ns();
    (step.n_ubatch == 0 ? step.prepare : step.readback) += step.clock.lap(now);
    ub = ubatch_state();
    ub.open     = true;
    ub.encoder  = encoder;
    ub.n_tokens = n_tokens;
    ub.t_begin  = now;
    ub.clock.start(now);
    step.n_ubatch++;
}

void llama_instr_ubatch::lap_impl(phase p) {
    auto & ub = tl().ubatch;
    ub.laps[p] += ub.clock.lap(ggml_instr_clock_ns());
}

bool llama_instr_ubatch::may_reuse_impl() const {
    return tl().step.state->graphs_known;
}

void llama_instr_ubatch::reused_impl() {
    tl().ubatch.reused = true;
    tl().step.n_reused++;
}

void llama_instr_ubatch::build_impl(ggml_backend_sched_t sched, bool has_eval_callback) {
    auto & build = tl().build;
    build.open = true;
    build.last = nullptr;
    build.layers.clear();
    session & s = *tl().step.s;
    if (!s.reads_values()) {
        return;
    }
    if (has_eval_callback) {
        llama_instr_message(GGML_LOG_LEVEL_WARN, "no tensor values are read: the application has an eval callback of its own");
    } else {
        ggml_backend_sched_set_eval_callback(sched, stats_callback, nullptr);
    }
}

void llama_instr_ubatch::finish() {
    auto & step = tl().step;
    tl().ubatch.open = false;
    tl().build.open  = false;
    step.clock.start(ggml_instr_clock_ns());
}

void llama_instr_graph_cb_impl(ggml_context * ctx0, int il) {
    auto & build = tl().build;
    if (!build.open) {
        return;  // a graph that is only measured, not computed
    }
    ggml_tensor * t = build.last ? ggml_get_next_tensor(ctx0, build.last) : ggml_get_first_tensor(ctx0);
    for (; t; t = ggml_get_next_tensor(ctx0, t)) {
        build.layers[t] = il;
        build.last      = t;
    }
}

//
// computes
//

void llama_instr_compute::begin(const llama_context * ctx, ggml_cgraph * gf, int n_threads) {
    auto & step = tl().step;
    auto & ub   = tl().ubatch;
    auto & c    = tl().compute;
    c.s = step.depth > 0 ? step.s : current_session();
    if (!c.s) {
        return;
    }
    active = true;
    if (ub.open) {
        ub.laps[llama_instr_ubatch::INPUTS] += ub.clock.lap(ggml_instr_clock_ns());
    }
    {
        recorder_clock recorder;
        c.state     = &c.s->of(ctx);
        c.is_update = !ub.open;
        c.n_threads = n_threads;
        c.gf        = gf;
        c.stopped   = false;
        static const std::unordered_map<const ggml_tensor *, int> nothing;
        const char * source = c.is_update ? "memory_update" : ub.encoder ? "encode" : "decode";
        c.graph = &graph_of(*c.s, *c.state, gf, source, c.is_update, tl().build.open ? tl().build.layers : nothing);
        tl().build.open = false;

        const int n_recorded = c.s->detail == level::verbose ? n_threads : 1;
        const int n_splits   = ggml_backend_sched_get_n_splits(ctx->get_sched());
        const bool room = ggml_instr_sink_reset(&c.state->sink, n_recorded, ggml_graph_n_nodes(gf), n_splits);
        if (!room) {
            c.s->dropped_ops += (uint64_t) ggml_graph_n_nodes(gf);
        }
        c.times.compute = c.s->next_compute++;
        ggml_instr_set_sink(room ? &c.state->sink : nullptr);
    }
    c.times.begin_ns    = ggml_instr_clock_ns();
    c.times.begin_ticks = ggml_instr_ticks(c.state->sink.use_counter);
    c.t_begin = ub.open ? ub.t_begin : c.times.begin_ns;
}

void llama_instr_compute::finish() {
    auto & step = tl().step;
    auto & ub   = tl().ubatch;
    auto & c    = tl().compute;
    c.times.end_ns    = ggml_instr_clock_ns();
    c.times.end_ticks = ggml_instr_ticks(c.state->sink.use_counter);
    const bool recorded = ggml_instr_get_sink() != nullptr;
    ggml_instr_set_sink(nullptr);
    active = false;
    if (c.stopped && status == GGML_STATUS_SUCCESS) {
        status = GGML_STATUS_ABORTED;
    }

    recorder_clock recorder;
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_COMPUTE, c.t_begin);
    line.kv(LLAMA_INSTR_K_COMPUTE, c.times.compute).kv(LLAMA_INSTR_K_GRAPH, c.graph->id).kv(LLAMA_INSTR_K_CTX, c.state->id);
    if (step.depth > 0 && step.id >= 0) {
        line.kv(LLAMA_INSTR_K_STEP, step.id);
    }
    line.kv(LLAMA_INSTR_K_SOURCE, c.is_update ? "memory_update" : ub.encoder ? "encode" : "decode");
    line.kv(LLAMA_INSTR_K_REUSED, !c.is_update && ub.reused);
    if (!c.is_update) {
        line.kv(LLAMA_INSTR_K_N_TOKENS, ub.n_tokens);
    }
    line.kv(LLAMA_INSTR_K_N_THREADS, c.n_threads);
    if (!c.is_update) {
        line.kv(LLAMA_INSTR_K_APPLY, ub.laps[llama_instr_ubatch::APPLY]).kv(LLAMA_INSTR_K_BUILD, ub.laps[llama_instr_ubatch::BUILD]);
        line.kv(LLAMA_INSTR_K_ALLOC, ub.laps[llama_instr_ubatch::ALLOC]).kv(LLAMA_INSTR_K_INPUTS, ub.laps[llama_instr_ubatch::INPUTS]);
        line.kv(LLAMA_INSTR_K_START, c.times.begin_ns - c.t_begin);
    }
    line.kv(LLAMA_INSTR_K_DUR, c.times.end_ns - c.times.begin_ns);
    if (status != GGML_STATUS_SUCCESS) {
        line.kv(LLAMA_INSTR_K_STATUS, (int) status);
    }
    c.s->write(LLAMA_INSTR_EV_COMPUTE, line);
    for (const auto & entry : c.lines_after) {
        c.s->log.write(entry.first, entry.second);
    }
    c.lines_after.clear();
    if (recorded) {
        write_kernels(*c.s, *c.state, *c.graph, c.times);
    }
    c.s.reset();
}

namespace llama_instr {

void stop_compute() {
    tl().compute.stopped = true;
}

session * computing_session() {
    return tl().compute.s.get();
}

bool find_computed_node(const ggml_tensor * t, node_reference & out) {
    const auto & c = tl().compute;
    for (int i = 0; c.s && i < ggml_graph_n_nodes(c.gf); i++) {
        if (ggml_graph_node(c.gf, i) == t) {
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

void llama_instr_sync::begin(const llama_context * ctx) {
    const auto s = current_session();
    context_state * state = s ? s->find(ctx) : nullptr;
    if (state && state->has_device) {
        ctx_id  = state->id;
        t_begin = ggml_instr_clock_ns();
    }
}

void llama_instr_sync::finish() {
    const uint64_t now = ggml_instr_clock_ns();
    const auto s = current_session();
    if (s && t_begin >= s->t_start) {
        recorder_clock recorder;
        json_line & line = line_buffer();
        line.begin(LLAMA_INSTR_EV_SYNC, t_begin).kv(LLAMA_INSTR_K_CTX, ctx_id).kv(LLAMA_INSTR_K_DUR, now - t_begin);
        s->write(LLAMA_INSTR_EV_SYNC, line);
    }
}

//
// sampling
//

void llama_instr_sample::begin() {
    llama_synchronize(ctx);  // what is still computing is not the sampler's time
    t_begin = ggml_instr_clock_ns();
}

void llama_instr_sample::finish(llama_token token, float p) {
    const uint64_t now = ggml_instr_clock_ns();
    const auto s = current_session();
    if (!s || t_begin < s->t_start) {
        return;  // the session began while the sampler ran
    }
    context_state & state = s->of(ctx);
    const std::string piece = token >= 0 && ctx->get_model().vocab.get_type() != LLAMA_VOCAB_TYPE_NONE ? ctx->get_model().vocab.token_to_piece(token) : "";
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_TOKEN, t_begin);
    line.kv(LLAMA_INSTR_K_CTX, state.id);
    if (state.last_step >= 0) {
        line.kv(LLAMA_INSTR_K_STEP, state.last_step);
    }
    line.kv(LLAMA_INSTR_K_INDEX, state.tokens++).kv(LLAMA_INSTR_K_ID, token).kv(LLAMA_INSTR_K_TEXT, piece);
    if (!json_line::is_utf8(piece)) {
        line.kv(LLAMA_INSTR_K_HEX, json_line::hex(piece));
    }
    if (p > 0.0f) {
        line.kv(LLAMA_INSTR_K_P, p);
    }
    line.kv(LLAMA_INSTR_K_DUR, now - t_begin);
    s->write(LLAMA_INSTR_EV_TOKEN, line);
    s->overhead_ns += ggml_instr_clock_ns() - now;
}

//
// messages
//

void llama_instr_message(enum ggml_log_level level, const char * text) {
    if (!llama_instr_enabled() || (level != GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_ERROR)) {
        return;
    }
    // not current_session(): opening one may itself print a message
    const auto s = open_session_or_null();
    if (!s) {
        return;
    }
    std::string trimmed = text;
    while (!trimmed.empty() && trimmed.back() == '\n') {
        trimmed.pop_back();
    }
    json_line line;  // not the thread's: a message may come while that is being built
    line.begin(LLAMA_INSTR_EV_MESSAGE, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_LEVEL, level == GGML_LOG_LEVEL_WARN ? "warn" : "error").kv(LLAMA_INSTR_K_TEXT, trimmed);
    s->write(LLAMA_INSTR_EV_MESSAGE, line);
}
