// llama-instrumentation-thread.h - what one call of llama_decode needs to remember, in a thread-local
//
// All of the recorder's own work is timed and taken out of the spans around it, so that a step's parts
// add up to the step.

#pragma once

#include "llama-instrumentation-session.h"

#include <array>

namespace llama_instr {

// a clock that stops while the recorder works
struct span_clock {
    uint64_t last  = 0;
    uint64_t spent = 0;

    void start(uint64_t now) {
        last  = now;
        spent = recorder_clock::spent();
    }

    // nanoseconds since the last lap, without the recorder's own
    uint64_t lap(uint64_t now) {
        const uint64_t recorder = recorder_clock::spent() - spent;
        const uint64_t elapsed  = now - last;
        start(now);
        return elapsed > recorder ? elapsed - recorder : 0;
    }
};

struct step_state {
    std::shared_ptr<session> s;
    context_state * state = nullptr;
    int      depth = 0;
    int      id    = -1;   // -1 until the batch is known
    uint64_t t_begin        = 0;
    uint64_t spent_at_begin = 0;
    span_clock clock;
    uint64_t prepare  = 0;
    uint64_t readback = 0;
    int      n_ubatch = 0;
    int      n_reused = 0;
};

struct ubatch_state {
    bool     open    = false;
    bool     encoder = false;
    bool     reused  = false;
    bool     computed = false;
    uint32_t n_tokens = 0;
    uint64_t t_begin  = 0;
    span_clock clock;
    std::array<uint64_t, 4> laps = {};
};

struct compute_state {
    std::shared_ptr<session> s;
    context_state * state = nullptr;
    graph_state *   graph = nullptr;
    compute_times   times = {};
    uint64_t t_begin   = 0;
    int      n_threads = 0;
    bool     is_update = false;
    bool     stopped   = false;  // by a NaN
    ggml_cgraph * gf   = nullptr;
    std::vector<std::pair<const char *, std::string>> lines_after;
};

struct build_state {
    bool open = false;
    ggml_tensor * last = nullptr;
    std::unordered_map<const ggml_tensor *, int> layers;
};

struct thread_state {
    step_state    step;
    ubatch_state  ubatch;
    compute_state compute;
    build_state   build;
};

thread_state & tl();

}  // namespace llama_instr
