// llama-instrumentation-thread.h - the state of one call of llama_decode, in a thread-local
//
// The recorder times its own work and subtracts it from the spans around it, so that the parts of a step add up to
// the step. Spans are counted in ticks; they become nanoseconds when they are written.

#pragma once

#include "llama-instrumentation-session.h"

#include <array>

namespace [[gnu::visibility("hidden")]] llama_instr {

// a clock that stops while the recorder works; `spent` is the recorder's time in this thread so far
struct span_clock {
    uint64_t last         = 0;
    uint64_t spent_before = 0;

    void start(uint64_t now, uint64_t spent) {
        last         = now;
        spent_before = spent;
    }

    // ticks since the last lap, without those of the recorder
    uint64_t lap(uint64_t now, uint64_t spent) {
        const uint64_t recorder = spent - spent_before;
        const uint64_t elapsed  = now - last;
        start(now, spent);
        return elapsed > recorder ? elapsed - recorder : 0;
    }
};

struct step_state {
    std::shared_ptr<log_part> s;
    context_state * state = nullptr;
    ggml_instr_sink * sink = nullptr;  // of the compute from which a decode inside this step was called
    int      depth = 0;    // more than 1 inside a decode that a callback calls: nothing of it is recorded
    int      id    = -1;   // -1 until the batch is known
    uint64_t begin          = 0;
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
    uint32_t n_tokens   = 0;
    uint64_t begin    = 0;
    uint64_t computed = 0;  // when the recorder was done with its compute
    span_clock clock;
    std::array<uint64_t, 4> laps = {};
};

struct compute_state {
    std::shared_ptr<log_part> s;
    context_state * state = nullptr;
    graph_state *   graph = nullptr;
    compute_times   times = {};
    int      n_threads = 0;
    const char * source = "";    // a literal
    bool     is_update = false;
    bool     again     = false;  // a server's: of the graph that this backend computed before
    bool     recorded  = false;  // its kernels
    bool     stopped   = false;  // by a NaN or a debugger
    ggml_cgraph * gf   = nullptr;
    int      last_found = 0;     // the node that the scheduler asked for
    std::vector<uint8_t> wanted;  // by a debugger: the nodes after which it is called
    std::vector<std::string> stats;  // lines that are written after the compute's
    std::shared_ptr<device_compute> devices;  // once it has begun a run on one

    // -- once the state and the graph are known, around ggml's compute: what its kernels leave, and its number
    void begin_kernels();
    void end_kernels();
};

struct build_state {
    bool open = false;
    ggml_tensor * last = nullptr;
    std::unordered_map<const ggml_tensor *, int> layers;

    void begin() {
        open = true;
        last = nullptr;
        layers.clear();
    }
};

struct thread_state {
    uint64_t      spent = 0;  // ticks of the recorder itself in this thread
    step_state    step;
    ubatch_state  ubatch;
    compute_state compute;
    build_state   build;
    std::vector<uint32_t> cells;  // that a ubatch takes
    // the session and the step that a wait for a device and a sampler belong to
    std::shared_ptr<log_part> waiting;
    std::shared_ptr<log_part> sampling;
    int32_t sampled_seq = -1;  // of the next token, -1: that of its logits
    int32_t served = -1;       // the compute of the command that a server carries out
};

// call once per hook: the lookup of a thread-local is a call
thread_state & tl();

// counts the time of its scope as the recorder's
struct recorder_clock {
    thread_state & thread;
    uint64_t       begin;
    bool           runs = true;

    explicit recorder_clock(thread_state & thread_) : recorder_clock(thread_, ticks_now()) {}
    recorder_clock(thread_state & thread_, uint64_t now) : thread(thread_), begin(now) {}
    ~recorder_clock() {
        if (runs) {
            stop(ticks_now());
        }
    }

    void stop(uint64_t now) {
        thread.spent += now - begin;
        runs = false;
    }
};

}  // namespace llama_instr
