// llama-instrumentation-records.h - what comes with every decode, as it is kept until the log is written
//
// A record holds plain numbers, with times and durations in ticks, and formats itself as lines of the log. A number
// that may be absent is -1 then.

#pragma once

#include "llama-instrumentation-log.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-ticks.h"

#include <algorithm>

namespace [[gnu::visibility("hidden")]] llama_instr {

// what a batch has of one sequence
struct batch_sequence {
    int32_t seq, pos, tokens, outputs;
};

// the tail holds the sequences of the batch
struct alignas(8) step_begin_record {
    uint64_t t;
    int32_t  step, ctx, n_tokens, n_outputs, n_seqs, pos, thread;
    bool     encode, prefill;

    void format(std::string_view tail, log_lines & lines) const {
        json_line & line = lines.begin(LLAMA_INSTR_EV_STEP_BEGIN, lines.clock->ns(t));
        line.kv(LLAMA_INSTR_K_STEP, step).kv(LLAMA_INSTR_K_CTX, ctx);
        line.kv(LLAMA_INSTR_K_KIND, encode ? "encode" : "decode").kv(LLAMA_INSTR_K_PHASE, prefill ? "prefill" : "decode");
        line.kv(LLAMA_INSTR_K_N_TOKENS, n_tokens).kv(LLAMA_INSTR_K_N_OUTPUTS, n_outputs).kv(LLAMA_INSTR_K_N_SEQS, n_seqs);
        line.kv(LLAMA_INSTR_K_POS, pos).kv(LLAMA_INSTR_K_THREAD, thread);
        const auto * of    = (const batch_sequence *) tail.data();
        const size_t n     = tail.size() / sizeof(*of);
        const auto   column = [&](const char * key, int32_t batch_sequence::* what, bool ones) {
            const auto is_one = [what](const batch_sequence & s) { return s.*what == 1; };
            if (ones || !std::all_of(of, of + n, is_one)) {
                line.column(key, n, [of, what](size_t i) { return of[i].*what; });
            }
        };
        if (n > 0) {
            column(LLAMA_INSTR_K_SEQ,         &batch_sequence::seq,     true);
            column(LLAMA_INSTR_K_SEQ_POS,     &batch_sequence::pos,     true);
            column(LLAMA_INSTR_K_SEQ_TOKENS,  &batch_sequence::tokens,  false);
            column(LLAMA_INSTR_K_SEQ_OUTPUTS, &batch_sequence::outputs, false);
        }
        line.end();
    }
};

struct alignas(8) step_end_record {
    uint64_t begin, end, prepare, readback, recorder;
    int64_t  minflt, majflt;               // -1: not read
    int32_t  step, status, n_ubatch, n_reused;

    void format(std::string_view, log_lines & lines) const {
        const tick_scale scale(lines.clock->at(begin), lines.clock->at(end));
        json_line & line = lines.begin(LLAMA_INSTR_EV_STEP_END, lines.clock->ns(end));
        line.kv(LLAMA_INSTR_K_STEP, step).kv(LLAMA_INSTR_K_STATUS, status);
        line.kv(LLAMA_INSTR_K_N_UBATCH, n_ubatch).kv(LLAMA_INSTR_K_N_REUSED, n_reused);
        line.kv(LLAMA_INSTR_K_PREPARE, scale.duration(prepare)).kv(LLAMA_INSTR_K_READBACK, scale.duration(readback));
        line.kv(LLAMA_INSTR_K_RECORDER, scale.duration(recorder));
        line.kv_if_known(LLAMA_INSTR_K_MINFLT, minflt).kv_if_known(LLAMA_INSTR_K_MAJFLT, majflt);
        line.end();
    }
};

struct alignas(8) compute_record {
    uint64_t ubatch, apply, build, alloc, inputs;  // 0 outside of a ubatch
    uint64_t begin, end;
    int32_t  compute, graph, ctx, step, n_tokens, n_threads, status;
    bool     of_ubatch, reused;
    const char * source;  // a literal

    void format(std::string_view, log_lines & lines) const {
        // the line through both, so that the parts are never longer than the whole: a write may fall between them
        const tick_scale scale(lines.clock->at(of_ubatch ? ubatch : begin), lines.clock->at(begin));
        const uint64_t begin_ns = lines.clock->ns(begin);
        const uint64_t t = scale.begin.ns;
        json_line & line = lines.begin(LLAMA_INSTR_EV_COMPUTE, t);
        line.kv(LLAMA_INSTR_K_COMPUTE, compute).kv(LLAMA_INSTR_K_GRAPH, graph).kv(LLAMA_INSTR_K_CTX, ctx);
        line.kv_if_known(LLAMA_INSTR_K_STEP, step);
        line.kv(LLAMA_INSTR_K_SOURCE, source);
        line.kv(LLAMA_INSTR_K_REUSED, reused);
        if (of_ubatch) {
            line.kv(LLAMA_INSTR_K_N_TOKENS, n_tokens);
        }
        line.kv(LLAMA_INSTR_K_N_THREADS, n_threads);
        if (of_ubatch) {
            line.kv(LLAMA_INSTR_K_APPLY, scale.duration(apply));
            if (!reused) {
                line.kv(LLAMA_INSTR_K_BUILD, scale.duration(build)).kv(LLAMA_INSTR_K_ALLOC, scale.duration(alloc));
            }
            line.kv(LLAMA_INSTR_K_INPUTS, scale.duration(inputs)).kv(LLAMA_INSTR_K_START, begin_ns - t);
        }
        line.kv(LLAMA_INSTR_K_DUR, lines.clock->ns(end) - begin_ns);
        if (status != 0) {
            line.kv(LLAMA_INSTR_K_STATUS, status);
        }
        line.end();
    }
};

// the tail holds the cells at `verbose`
struct alignas(8) kv_record {
    static constexpr int32_t none = INT32_MIN;

    const char * op;  // a literal
    uint64_t t, used, size, bytes;
    int64_t  n_kv;
    int32_t  ctx, step, cache;
    bool     recurrent, has_cells;
    int32_t  seq = none, seq_dst = none, p0 = none, p1 = none, arg = none;

    void format(std::string_view tail, log_lines & lines) const {
        json_line & line = lines.begin(LLAMA_INSTR_EV_KV, lines.clock->ns(t));
        line.kv(LLAMA_INSTR_K_CTX, ctx).kv_if_known(LLAMA_INSTR_K_STEP, step);
        if (cache > 0) {
            line.kv(LLAMA_INSTR_K_CACHE, cache);
        }
        if (recurrent) {
            line.kv(LLAMA_INSTR_K_KIND, "recurrent");
        }
        line.kv(LLAMA_INSTR_K_OP, op).kv(LLAMA_INSTR_K_USED, used).kv(LLAMA_INSTR_K_SIZE, size);
        line.kv(LLAMA_INSTR_K_BYTES, bytes).kv_if_known(LLAMA_INSTR_K_N_KV, n_kv);
        if (has_cells) {
            const uint32_t * cells = (const uint32_t *) tail.data();
            line.column(LLAMA_INSTR_K_CELLS, tail.size() / sizeof(*cells), [cells](size_t i) { return cells[i]; });
        }
        const auto argument = [&line](const char * key, int32_t value) {
            if (value != none) {
                line.kv(key, value);
            }
        };
        argument(LLAMA_INSTR_K_SEQ, seq);
        argument(LLAMA_INSTR_K_SEQ_DST, seq_dst);
        argument(LLAMA_INSTR_K_P0, p0);
        argument(LLAMA_INSTR_K_P1, p1);
        argument(LLAMA_INSTR_K_ARG, arg);
        line.end();
    }
};

// the tail is the token's text
struct alignas(8) token_record {
    uint64_t begin, end;
    int32_t  ctx, step, seq, index, id;
    float    p;

    void format(std::string_view tail, log_lines & lines) const {
        const std::string piece(tail);
        const uint64_t t = lines.clock->ns(begin);
        json_line & line = lines.begin(LLAMA_INSTR_EV_TOKEN, t);
        line.kv(LLAMA_INSTR_K_CTX, ctx).kv_if_known(LLAMA_INSTR_K_STEP, step).kv_if_known(LLAMA_INSTR_K_SEQ, seq);
        line.kv(LLAMA_INSTR_K_INDEX, index).kv(LLAMA_INSTR_K_ID, id).kv(LLAMA_INSTR_K_TEXT, piece);
        if (!json_line::is_utf8(piece)) {
            line.kv(LLAMA_INSTR_K_HEX, json_line::hex(piece));
        }
        if (p > 0.0f) {
            line.kv(LLAMA_INSTR_K_P, p);
        }
        line.kv(LLAMA_INSTR_K_DUR, lines.clock->ns(end) - t);
        line.end();
    }
};

}  // namespace llama_instr
