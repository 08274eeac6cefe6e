// llama-instrumentation.h - the hooks that llama.cpp calls, and the C API
//
// Every hook is a call site of one or two lines in a patch. With no session open, each costs the load of
// a flag and a branch that is always predicted.

#pragma once

#define LLAMA_INSTR_LIBRARY  // other libraries, such as mtmd, are programs
#include "llama-instrumentation-programs.h"
#include "llama.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

//
// C API
//

#define LLAMA_INSTR_ABI 4

extern "C" {

// flags of llama_instr_begin()
enum {
    LLAMA_INSTR_OVERWRITE     = 1,  // of an existing file
    LLAMA_INSTR_STOP_ON_NAN   = 2,  // end the compute at the first tensor of `stats` that has a NaN
    LLAMA_INSTR_STOP_ON_ERROR = 4,  // end the process, with one line, when the log cannot be written
    LLAMA_INSTR_DEBUGGED      = 8,  // a debugger may stop computes and change values
};

// bits of llama_instr_status()
enum {
    LLAMA_INSTR_ACTIVE = 1,
    LLAMA_INSTR_FAILED = 2,  // the log could not be written, events are dropped
    LLAMA_INSTR_NAN    = 4,  // a tensor of `stats` had a NaN
};

LLAMA_API int32_t      llama_instr_abi(void);
LLAMA_API const char * llama_instr_info(void);   // a JSON object: the log's `producer`
LLAMA_API const char * llama_instr_error(void);  // of the last call that failed, in this thread

// Opens the session of the process. `args` is a JSON object or NULL. `stats` is a regular expression for the names
// of the nodes whose values are read, or NULL. Returns 0 or -errno.
LLAMA_API int32_t llama_instr_begin(const char * path, const char * level, const char * args, const char * stats, int32_t flags);

// Waits for the steps under way and closes the log. Returns 0, or -errno when events were lost.
LLAMA_API int32_t llama_instr_end(void);

LLAMA_API int32_t llama_instr_status(void);
LLAMA_API int64_t llama_instr_dropped(void);  // events that could not be written

// Writes the memory breakdown of a context as a JSON array with one object per buffer type. Returns its length; if
// that is `size` or more, the text was cut.
LLAMA_API int32_t llama_instr_memory(const struct llama_context * ctx, char * buf, int32_t size);

// Writes the graph of a ubatch with so many tokens, sequences and outputs as a `graph` event, without computing or
// allocating it. Its cache is in use up to the last cell. Returns the graph's id, or -1 without a session.
LLAMA_API int32_t llama_instr_reserve_graph(struct llama_context * ctx, uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs);

// What a debugger is told of a compute that begins: `layers` and `wanted` have an element for each of its nodes.
struct llama_instr_debug_info {
    const struct llama_context * ctx;
    struct ggml_cgraph * graph;
    const int32_t *      layers;
    uint8_t *            wanted;  // 1: `on_node` is called after this node; may be changed until the compute ends
    int32_t n_nodes;
    int32_t n_tokens;
    int32_t step;                 // -1 outside a step
    int32_t compute;
    int32_t graph_id;
    int32_t encoder;
};

typedef void (*llama_instr_on_compute)(const struct llama_instr_debug_info * info);

// the value of the node is there and may be changed; returns 0 to go on, 1 to end the compute
typedef int32_t (*llama_instr_on_node)(int32_t node);

// Attaches a debugger to the sessions with LLAMA_INSTR_DEBUGGED, or detaches it (both NULL). Call it while nothing is
// computed. Both functions are called in the thread that computes. A compute without a wanted node runs as always.
LLAMA_API void llama_instr_debug(llama_instr_on_compute on_compute, llama_instr_on_node on_node);

}  // extern "C"

//
// hooks
//

struct ggml_cgraph;
struct llama_adapter_lora;
struct llama_batch_ext;
class  llama_kv_cache;
class  llama_memory_recurrent;

// Hidden, so that calls are direct: an exported name is called through two tables, which have left the caches
// by the next decode.
#pragma GCC visibility push(hidden)

// true while a session is open or the environment asks for one
extern std::atomic<bool> llama_instr_on;

static inline bool llama_instr_enabled() {
    return llama_instr_on.load(std::memory_order_relaxed);
}

// llama_decode, llama_encode, llama_process: around the call
class llama_instr_step {
  public:
    explicit llama_instr_step(const llama_context * ctx) {
        if (llama_instr_enabled()) {
            begin(ctx);
        }
    }

    ~llama_instr_step() {
        if (active) {
            finish();
        }
    }

    int end(int status_) {
        status = status_;
        return status;
    }

  private:
    bool active = false;
    int  status = -1;  // stays when an exception leaves the call

    void begin(const llama_context * ctx);
    void finish();
};

// llama_context::decode, llama_context::encode: the batch, once it is known which of the two it is
void llama_instr_batch_impl(const llama_context * ctx, const llama_batch_ext & batch, bool encode);

static inline void llama_instr_batch(const llama_context * ctx, const llama_batch_ext & batch, bool encode) {
    if (llama_instr_enabled()) {
        llama_instr_batch_impl(ctx, batch, encode);
    }
}

// llama_context::process_ubatch: its phases, each ended by lap()
class llama_instr_ubatch {
  public:
    enum phase { APPLY, BUILD, ALLOC, INPUTS };

    llama_instr_ubatch(const llama_context * ctx, uint32_t n_tokens, bool encoder) {
        if (llama_instr_enabled()) {
            begin(ctx, n_tokens, encoder);
        }
    }

    ~llama_instr_ubatch() {
        if (active) {
            finish();
        }
    }

    void lap(phase p) {
        if (active) {
            lap_impl(p);
        }
    }

    // the graph was built before the session knew it: its layers are unknown
    bool may_reuse() const { return !active || may_reuse_impl(); }

    void reused() {
        if (active) {
            reused_impl();
        }
    }

    // a graph is about to be built, and its scheduler's eval callback has been set
    void build(ggml_backend_sched_t sched, bool has_eval_callback) {
        if (active) {
            build_impl(sched, has_eval_callback);
        }
    }

  private:
    bool active = false;

    void begin(const llama_context * ctx, uint32_t n_tokens, bool encoder);
    void finish();
    void lap_impl(phase p);
    bool may_reuse_impl() const;
    void reused_impl();
    void build_impl(ggml_backend_sched_t sched, bool has_eval_callback);
};

// llm_graph_context::cb: `il` is the layer of every tensor created since the previous call
void llama_instr_graph_cb_impl(ggml_context * ctx0, int il);

static inline void llama_instr_graph_cb(ggml_context * ctx0, int il) {
    if (llama_instr_enabled()) {
        llama_instr_graph_cb_impl(ctx0, il);
    }
}

// llama_context::graph_compute: around ggml's compute
class llama_instr_compute {
  public:
    llama_instr_compute(const llama_context * ctx, ggml_cgraph * gf, int n_threads) {
        if (llama_instr_enabled()) {
            begin(ctx, gf, n_threads);
        }
    }

    ~llama_instr_compute() {
        if (active) {
            finish();
        }
    }

    // returns the status for the caller: a compute that a NaN has stopped did not succeed
    ggml_status end(ggml_status status_) {
        status = status_;
        if (active) {
            finish();
        }
        return status;
    }

  private:
    bool        active = false;
    ggml_status status = GGML_STATUS_FAILED;

    void begin(const llama_context * ctx, ggml_cgraph * gf, int n_threads);
    void finish();
};

// llama_context::synchronize: around the wait
class llama_instr_sync {
  public:
    explicit llama_instr_sync(const llama_context * ctx) {
        if (llama_instr_enabled()) {
            begin(ctx);
        }
    }

    ~llama_instr_sync() {
        if (ctx_id >= 0) {
            finish();
        }
    }

  private:
    int      ctx_id  = -1;
    uint64_t t_begin = 0;

    void begin(const llama_context * ctx);
    void finish();
};

// in apply() of a cache's context: `cells` are those that the ubatch takes, by stream; empty for a shift
void llama_instr_kv_apply_impl(const llama_kv_cache * kv, const std::vector<std::vector<uint32_t>> * cells, uint32_t n_kv);
void llama_instr_recurrent_apply_impl(const llama_memory_recurrent * mem);

static inline void llama_instr_kv_apply(const llama_kv_cache * kv, const std::vector<std::vector<uint32_t>> * cells, uint32_t n_kv) {
    if (llama_instr_enabled()) {
        llama_instr_kv_apply_impl(kv, cells, n_kv);
    }
}

static inline void llama_instr_recurrent_apply(const llama_memory_recurrent * mem) {
    if (llama_instr_enabled()) {
        llama_instr_recurrent_apply_impl(mem);
    }
}

// llama_memory_*: around an operation that the application calls
class llama_instr_memory_op {
  public:
    // the meaning of the arguments depends on the operation; unused ones are `none`
    static constexpr int none = INT32_MIN;

    llama_instr_memory_op(llama_memory_t mem_, const char * op_, int seq_ = none, int seq_dst_ = none, int p0_ = none, int p1_ = none, int arg_ = none) :
        mem(llama_instr_enabled() ? mem_ : nullptr), op(op_), seq(seq_), seq_dst(seq_dst_), p0(p0_), p1(p1_), arg(arg_) {
        if (mem) {
            begin();
        }
    }

    ~llama_instr_memory_op() {
        if (mem) {
            finish();
        }
    }

  private:
    llama_memory_t mem;
    const char *   op;
    int            seq, seq_dst, p0, p1, arg;
    uint64_t       used_before = 0;

    void begin();
    void finish();
};

// llama_model_load_from_file_impl, llama_model::~llama_model. Models are registered even when nothing is recorded,
// so that a session that begins later knows those already loaded.
class llama_instr_model_load {
  public:
    explicit llama_instr_model_load(const char * path);
    void done(const llama_model * model);

  private:
    const char * path;
    uint64_t     t_begin;
};

void llama_instr_model_free(const llama_model * model);

// llama_init_from_model, llama_context::~llama_context
void llama_instr_context_init(const llama_context * ctx, const llama_context_params & params);
void llama_instr_context_free(const llama_context * ctx);

// llama_adapter_lora_init, llama_adapter_lora_free, llama_context::set_adapters_lora: also when nothing is recorded
void llama_instr_adapter_load(const llama_adapter_lora * adapter, const char * path);
void llama_instr_adapter_free(const llama_adapter_lora * adapter);
void llama_instr_adapters(const llama_context * ctx, const std::unordered_map<llama_adapter_lora *, float> & scales);

// llama_sampler_sample: around it
class llama_instr_sample {
  public:
    // output: as llama_get_logits_ith() takes it
    llama_instr_sample(llama_context * ctx_, int output_) : ctx(llama_instr_enabled() ? ctx_ : nullptr), output(output_) {
        if (ctx) {
            begin();
        }
    }

    // p: the probability of the token, 0 when the sampler computed none
    llama_token end(llama_token token, float p) {
        if (ctx) {
            finish(token, p);
        }
        return token;
    }

  private:
    llama_context * ctx;
    int             output;
    uint64_t        t_begin = 0;

    void begin();
    void finish(llama_token token, float p);
};

// llama_log_internal: warnings and errors
void llama_instr_message(enum ggml_log_level level, const char * text);

#pragma GCC visibility pop
