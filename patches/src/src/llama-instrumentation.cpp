// llama-instrumentation.cpp - the hooks: steps, ubatches, computes, samplers

#include "llama-instrumentation.h"

#include "llama-instrumentation-records.h"
#include "llama-instrumentation-values.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <array>
#include <sys/resource.h>
#include <utility>

using namespace llama_instr;

thread_state & llama_instr::tl() {
    thread_local thread_state state;
    return state;
}

//
// steps
//

void llama_instr_step::begin(const llama_context * ctx) {
    auto & t    = tl();
    auto & step = t.step;
    if (step.depth > 0) {  // a decode inside a decode, from a callback of the application
        if (step.depth++ == 1) {
            step.sink = ggml_instr_get_sink();
            ggml_instr_set_sink(nullptr);
        }
        active = true;
        return;
    }
    auto s = part_of_step();
    if (!s) {
        return;
    }
    // only now: another thread may just have opened the session that gets this step
    const uint64_t now   = ticks_now();
    const uint64_t spent = t.spent;
    recorder_clock recorder(t, now);
    active = true;
    step   = step_state();
    step.depth = 1;
    step.begin          = now;
    step.spent_at_begin = spent;
    step.clock.start(now, spent);
    step.state = &s->known.of(ctx);
    step.s     = std::move(s);
}

void llama_instr_batch_impl(const llama_context * ctx, const llama_batch_ext & batch, bool encode) {
    auto & t    = tl();
    auto & step = t.step;
    if (step.depth != 1 || step.id >= 0 || step.state->ctx != ctx) {
        return;
    }
    recorder_clock recorder(t);
    const bool output_all = encode || ctx->get_cparams().embeddings;
    const auto n_seq_max  = (llama_seq_id) ctx->get_cparams().n_seq_max;
    std::array<batch_sequence, LLAMA_MAX_SEQ> found;  // in the order of their first tokens
    std::array<int, LLAMA_MAX_SEQ> place;             // of a sequence in `found`
    std::fill_n(place.begin(), n_seq_max, -1);
    auto & sampled = step.state->sampled;
    sampled.clear();
    int n_outputs = 0, n_seqs = 0, most = 0;
    llama_pos pos = -1;
    for (const auto & token : batch.tokens) {
        const bool output = output_all || token.output;
        n_outputs += output;
        pos = pos < 0 ? token.pos[0] : std::min(pos, token.pos[0]);
        sampled.push_back({ token.seq_ids.size() == 1 ? *token.seq_ids.begin() : -1, output });
        for (const llama_seq_id seq : token.seq_ids) {
            if (seq < 0 || seq >= n_seq_max) {
                continue;
            }
            int & at = place[(size_t) seq];
            if (at < 0) {
                at = n_seqs++;
                found[(size_t) at] = { seq, token.pos[0], 0, 0 };
            }
            auto & of = found[(size_t) at];
            of.pos      = std::min(of.pos, token.pos[0]);
            of.tokens  += 1;
            of.outputs += output;
            most = std::max(most, of.tokens);
        }
    }
    step.id = step.state->last_step = step.s->all->next_step++;

    step_begin_record record = {};
    record.t         = step.begin;
    record.step      = step.id;
    record.ctx       = step.state->id;
    record.n_tokens  = (int32_t) batch.tokens.size();
    record.n_outputs = n_outputs;
    record.n_seqs    = n_seqs;
    record.pos       = pos;
    record.thread    = thread_id();
    record.encode    = encode;
    record.prefill   = most > 1;
    step.s->add(record, std::string_view((const char *) found.data(), (size_t) n_seqs * sizeof(found[0])));
}

// The page faults of the process since the last call. Another thread may have read the counters later and come
// here earlier; that thread then counts them.
static long faults_since(std::atomic<long> & last, long now) {
    long before = last.load();
    while (before < now && !last.compare_exchange_weak(before, now)) {
    }
    return before < now ? now - before : 0;
}

// costs several times what all the hooks of a decode cost: the kernel asks every thread
static void ask_for_faults(log_part & s, step_end_record & record) {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    record.minflt = faults_since(s.minflt, usage.ru_minflt);
    record.majflt = faults_since(s.majflt, usage.ru_majflt);
}

void llama_instr_step::finish() {
    auto & t    = tl();
    auto & step = t.step;
    if (step.depth > 1) {
        if (--step.depth == 1) {
            ggml_instr_set_sink(step.sink);
        }
        return;
    }
    const uint64_t entry = ticks_now();
    (step.n_ubatch == 0 ? step.prepare : step.readback) += step.clock.lap(entry, t.spent);
    const uint64_t spent = t.spent - step.spent_at_begin;
    step_end_record record = {};
    record.begin  = step.begin;
    record.end    = entry;
    record.minflt = record.majflt = -1;
    if (step.s->faults_due && step.s->faults_due.exchange(false)) {
        ask_for_faults(*step.s, record);
        record.end = ticks_now();
    }
    if (step.id >= 0) {
        record.prepare  = step.prepare;
        record.readback = step.readback;
        record.recorder = spent + (record.end - entry);
        record.step     = step.id;
        record.status   = status;
        record.n_ubatch = step.n_ubatch;
        record.n_reused = step.n_reused;
        step.s->add(record);
    }
    const uint64_t exit = ticks_now();
    step.s->decode_ticks   += exit - step.begin;
    step.s->overhead_ticks += spent + (exit - entry);
    step.s->step_ends();
    step.depth = 0;
    step.s.reset();
}

//
// ubatches
//

void llama_instr_ubatch::begin(const llama_context * ctx, uint32_t n_tokens, bool encoder) {
    auto & t    = tl();
    auto & step = t.step;
    auto & ub   = t.ubatch;
    if (step.depth != 1 || step.state->ctx != ctx) {
        return;
    }
    active = true;
    const uint64_t now = ticks_now();
    (step.n_ubatch == 0 ? step.prepare : step.readback) += step.clock.lap(now, t.spent);
    ub = ubatch_state();
    ub.open     = true;
    ub.encoder  = encoder;
    ub.n_tokens = n_tokens;
    ub.begin    = now;
    ub.clock.start(now, t.spent);
    step.n_ubatch++;
}

void llama_instr_ubatch::lap_impl(phase p) {
    auto & t = tl();
    t.ubatch.laps[p] += t.ubatch.clock.lap(ticks_now(), t.spent);
}

bool llama_instr_ubatch::may_reuse_impl() const {
    return tl().step.state->graphs_known;  // NOLINT(clang-analyzer-core.NullDereference): set by begin()
}

void llama_instr_ubatch::reused_impl() {
    auto & t = tl();
    t.ubatch.reused = true;
    t.step.n_reused++;
}

void llama_instr_ubatch::build_impl(ggml_backend_sched_t sched, bool has_eval_callback) {
    tl().build.begin();
    log_part & s = *tl().step.s;
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
    auto & t = tl();
    t.ubatch.open = false;
    t.build.open  = false;
    // since the end of the compute, if there was one: the time was read there
    t.step.clock.start(t.ubatch.computed ? t.ubatch.computed : ticks_now(), t.spent);
}

void llama_instr_graph_cb_impl(ggml_context * ctx0, int il) {
    auto & build = tl().build;
    if (!build.open) {
        return;  // a graph that is only measured, neither computed nor written
    }
    recorder_clock recorder(tl());
    ggml_tensor * t = build.last ? ggml_get_next_tensor(ctx0, build.last) : ggml_get_first_tensor(ctx0);
    for (; t; t = ggml_get_next_tensor(ctx0, t)) {
        build.layers[t] = il;
        build.last      = t;
    }
}

//
// computes
//

static graph_state & other_graph(thread_state & t, ggml_cgraph * gf) {
    auto & c = t.compute;
    return graph_of(*c.s, *c.state, gf, c.source, c.is_update, t.build.open ? &t.build.layers : nullptr);
}

void compute_state::begin_kernels() {
    auto & sink = state->sink;
    sink.record_splits = graph->splits_matter;
    sink.split         = -1;
    const int n_recorded = s->detail == level::verbose ? n_threads : 1;
    const size_t n_nodes = graph->layers.size();
    const auto & experts = *graph->experts;
    recorded = ggml_instr_sink_reset(&sink, n_recorded, (int32_t) n_nodes, graph->n_splits) &&
               ggml_instr_sink_expect(&sink, experts.data(), (int32_t) experts.size());
    if (recorded) {
        ggml_instr_set_sink(&sink);
    } else {
        s->dropped_ops += n_nodes;
    }
    times.compute = s->all->next_compute++;
}

void compute_state::end_kernels() {
    if (recorded) {
        write_kernels(*s, *state, *graph, times);
    }
    if (const auto runs = std::exchange(devices, nullptr)) {
        runs->compute_is_written();
    }
}

void llama_instr_compute::begin(const llama_context * ctx, ggml_cgraph * gf, int n_threads) {
    auto & t    = tl();
    auto & step = t.step;
    auto & ub   = t.ubatch;
    auto & c    = t.compute;
    if (step.depth > 1) {
        return;
    }
    c.s = step.depth > 0 ? step.s : current_part();
    if (!c.s) {
        return;
    }
    active = true;
    recorder_clock recorder(t);
    if (ub.open) {
        ub.laps[llama_instr_ubatch::INPUTS] += ub.clock.lap(recorder.begin, t.spent);
    }
    c.state     = step.depth > 0 && step.state->ctx == ctx ? step.state : &c.s->known.of(ctx);
    c.is_update = !ub.open;
    c.source    = c.is_update ? "memory_update" : ub.encoder ? "encode" : "decode";
    c.n_threads = n_threads;
    c.gf        = gf;
    c.stopped   = false;
    c.last_found = 0;
    c.graph = c.state->last_graph(ggml_instr_graph_uid(gf));
    if (!c.graph) {
        c.graph = &other_graph(t, gf);
    }
    t.build.open = false;
    c.begin_kernels();
    if (c.s->has_flag(LLAMA_INSTR_DEBUGGED) && !c.is_update) {
        tell_debugger(*ctx, t);
    }
    c.times.begin = ticks_now();
    recorder.stop(c.times.begin);
}

void llama_instr_compute::finish() {
    auto & t    = tl();
    auto & step = t.step;
    auto & ub   = t.ubatch;
    auto & c    = t.compute;
    c.times.end = ticks_now();
    recorder_clock recorder(t, c.times.end);
    ggml_instr_set_sink(nullptr);
    active = false;
    if (c.stopped && status == GGML_STATUS_SUCCESS) {
        status = GGML_STATUS_ABORTED;
    }

    compute_record record = {};
    record.begin     = c.times.begin;
    record.end       = c.times.end;
    record.ubatch    = ub.begin;
    record.apply     = ub.laps[llama_instr_ubatch::APPLY];
    record.build     = ub.laps[llama_instr_ubatch::BUILD];
    record.alloc     = ub.laps[llama_instr_ubatch::ALLOC];
    record.inputs    = ub.laps[llama_instr_ubatch::INPUTS];
    record.compute   = c.times.compute;
    record.graph     = c.graph->id;
    record.ctx       = c.state->id;
    record.step      = step.depth > 0 ? step.id : -1;
    record.n_tokens  = (int32_t) ub.n_tokens;
    record.n_threads = c.n_threads;
    record.status    = (int32_t) status;
    record.of_ubatch = !c.is_update;
    record.source    = c.source;
    record.reused    = !c.is_update && ub.reused;
    c.s->add(record);
    for (const auto & line : c.stats) {
        c.s->log.write(LLAMA_INSTR_EV_TENSOR_STATS, line);
    }
    c.stats.clear();
    c.end_kernels();
    c.s.reset();
    ub.computed = ticks_now();
    recorder.stop(ub.computed);
}

void llama_instr_sync::begin(const llama_context * ctx) {
    auto s = current_part();
    context_state * state = s ? s->known.find(ctx) : nullptr;
    if (state && state->has_device) {
        tl().waiting = std::move(s);
        ctx_id  = state->id;
        t_begin = ggml_instr_clock_ns();
    }
}

void llama_instr_sync::finish() {
    const uint64_t now = ggml_instr_clock_ns();
    const auto s = std::move(tl().waiting);
    recorder_clock recorder(tl());
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_SYNC, t_begin);
    line.kv(LLAMA_INSTR_K_CTX, ctx_id).kv(LLAMA_INSTR_K_DUR, now - t_begin);
    s->write(LLAMA_INSTR_EV_SYNC, line);
}

//
// sampling
//

void llama_instr_sample::begin() {
    llama_synchronize(ctx);  // waits for the compute, which is not the sampler's time
    t_begin = llama_instr_sample_begin();
}

void llama_instr_sample::finish(llama_token token, float p) {
    llama_instr_sample_end(ctx, output, token, p, t_begin);
}

uint64_t llama_instr_sample_begin(void) {
    if (!llama_instr_enabled()) {
        return 0;
    }
    tl().sampling = current_part();
    return ticks_now();
}

void llama_instr_sample_for(int32_t seq) {
    tl().sampled_seq = seq;
}

void llama_instr_sample_end(llama_context * ctx, int32_t output, llama_token token, float p, uint64_t begin) {
    const uint64_t now = ticks_now();
    const auto s = std::move(tl().sampling);
    const int32_t sampled_seq = std::exchange(tl().sampled_seq, -1);
    if (!s) {
        return;
    }
    context_state & state = s->known.of(ctx);
    const auto & vocab = ctx->get_model().vocab;
    const std::string piece = token >= 0 && vocab.get_type() != LLAMA_VOCAB_TYPE_NONE ? vocab.token_to_piece(token) : "";
    token_record record = {};
    record.begin = begin;
    record.end   = now;
    record.ctx   = state.id;
    record.step  = state.last_step;
    record.seq   = sampled_seq >= 0 ? sampled_seq : state.sequence_of(output);
    record.index = state.tokens++;
    record.id    = token;
    record.p     = p;
    s->add(record, std::string_view(piece));
    s->overhead_ticks += ticks_now() - now;
}

//
// models and contexts come and go
//

llama_instr_model_load::llama_instr_model_load(const char * path_) : path(path_ ? path_ : ""), t_begin(ggml_instr_clock_ns()) {}

// writes it now, if a session is open
template <typename T> static void meet(const T * what) {
    if (const auto s = llama_instr_enabled() ? part_of_description() : nullptr) {
        s->known.of(what);
    }
}

void llama_instr_model_load::done(const llama_model * model) {
    keep_fact(model, model_load { path, t_begin, ggml_instr_clock_ns() - t_begin });
    meet(model);
}

void llama_instr_model_free(const llama_model * model) {
    for (const llama_adapter_lora * adapter : model->loras) {
        forget_facts(adapter);
    }
    forget_everywhere(model);
}

void llama_instr_context_init(const llama_context * ctx, const llama_context_params & params) {
    keep_fact(ctx, context_facts { params.type_k, params.type_v, params.ctx_other });
    meet(ctx);
}

void llama_instr_context_free(const llama_context * ctx) {
    forget_everywhere(ctx);
}

void llama_instr_adapter_load(const llama_adapter_lora * adapter, const char * path) {
    if (adapter) {
        keep_fact(adapter, path);
    }
}

void llama_instr_adapter_free(const llama_adapter_lora * adapter) {
    forget_facts(adapter);
}

void llama_instr_adapters(const llama_context * ctx, const std::unordered_map<llama_adapter_lora *, float> & scales) {
    keep_fact(ctx, adapters_json(scales));
    if (const auto s = llama_instr_enabled() ? part_of_description() : nullptr) {
        write_adapters_if_changed(*s, s->known.of(ctx));
    }
}
