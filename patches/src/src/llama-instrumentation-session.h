// llama-instrumentation-session.h - the open session: its log, its numbers, and what it knows of contexts
//
// One session is open in a process at a time; contexts and threads share it. A step holds a reference,
// so that a session which another thread ends lives until the step is over. A context's state is touched
// only by the thread that uses the context, as llama.cpp demands of its contexts anyway.

#pragma once

#include "llama-instrumentation-log.h"
#include "llama-instrumentation-ticks.h"
#include "llama-instrumentation-schema.h"

#include "ggml-instrumentation.h"
#include "llama.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <map>
#include <regex>
#include <unordered_map>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

enum class level { minimal, detailed, verbose };

bool parse_level(const char * text, level & out);

// consecutive kernels of one layer
struct layer_run {
    int32_t layer, first, last;
};

// the order in which the kernels of a graph ran, as it was written; does not change any more
struct plan_state {
    int id = -1;
    std::vector<uint64_t>  nodes;  // as in the sink
    std::vector<layer_run> runs;
};

// of a graph, and of the records that refer to it
using shared_plan = std::shared_ptr<const plan_state>;

// the plan that a thread's sink held, as long as its nodes have not changed
struct last_plan {
    shared_plan plan;
    uint64_t version = 0;
};

struct graph_state {
    uint64_t uid = 0;
    int      id  = -1;
    std::vector<int32_t>    layers;  // of every node
    std::vector<shared_plan> plans;
    std::vector<last_plan>  last;    // of every thread
    int      n_splits = 0;
    bool     splits_matter = false;  // more than one, or a device
};

// a memory that a context was seen to use
struct cache_state {
    const void * cache;
    bool         recurrent;
    uint64_t     bytes;  // of all cells
};

struct context_state {
    const llama_context * ctx = nullptr;
    int  id     = -1;
    int  tokens = 0;   // sampled so far
    int  last_step = -1;
    bool graphs_known = false;  // graphs built since the session began; older ones have no layers
    bool has_device   = false;
    std::string memory;  // the last breakdown that was written
    std::vector<cache_state> caches;
    std::vector<std::unique_ptr<graph_state>> graphs;  // most recently used last
    ggml_instr_sink sink = {};

    // the one that was computed last, if that has this uid
    graph_state * last_graph(uint64_t uid) const {
        return !graphs.empty() && graphs.back()->uid == uid ? graphs.back().get() : nullptr;
    }

    ~context_state() { ggml_instr_sink_free(&sink); }
};

// a span of the application that has not ended
struct open_mark {
    std::string name;
    int thread;
};

// what the parts of a rotated log have in common
struct recording {
    std::string id;
    std::string path;  // of the first part
    std::string args;
    std::atomic<uint64_t> rotate_bytes { 0 };  // a part that has grown past this is ended; 0: there is one part
    std::atomic<int>  next_step { 0 };
    std::atomic<int>  next_mark { 0 };
    std::atomic<bool> nan_seen { false };
    std::map<int64_t, open_mark> marks;  // with the lock of marks_lock()
};

struct model_state {
    int id = -1;
    std::unordered_map<const ggml_tensor *, int> weights;
};

// One log file: a whole recording or, when it rotates, a part. A step holds a reference to the part that it began
// in; the last reference to a part that another has followed closes its file.
class session {
  public:
    ~session() { close("rotated"); }

    std::shared_ptr<recording> all;
    int part = 1;

    // what was asked for
    level       detail = level::detailed;
    int32_t     flags  = 0;
    std::string stats_pattern;
    std::regex  stats;

    log_file log;

    // numbers that events refer to
    std::atomic<int> next_graph { 0 };
    std::atomic<int> next_plan { 0 };
    std::atomic<int> next_compute { 0 };

    // totals
    std::atomic<uint64_t> decode_ticks { 0 };
    std::atomic<uint64_t> overhead_ticks { 0 };
    std::atomic<uint64_t> dropped_ops { 0 };

    // page faults of the process when they were last asked for; the recorder's thread says when they are due again
    std::atomic<bool> faults_due { true };
    std::atomic<long> minflt { 0 };
    std::atomic<long> majflt { 0 };

    bool reads_values() const { return !stats_pattern.empty(); }

    // The state of a context; on its first use here, writes it, its model and its weights to the log.
    context_state & of(const llama_context * ctx);
    // the same, nullptr when the session has not met the context
    context_state * find(const llama_context * ctx);
    model_state   & of(const llama_model * model);
    void forget(const llama_context * ctx);
    void forget(const llama_model * model);
    context_state * find_by_memory(llama_memory_t mem);
    // only the thread that uses the context adds to its caches
    void add_cache(context_state & state, const cache_state & cache);
    // the contexts that this part's predecessor knew are this one's to find as well, with their caches
    void follow(session & previous);

    bool is_full() const {
        const uint64_t limit = all->rotate_bytes;
        return limit > 0 && log.size() >= limit;
    }

    // creates the file and writes session_start; returns 0 or -errno
    int start(const std::string & path, const held_file::existing & found);

    // the totals and the end of the file, if it is open; returns 0 or -errno
    int close(const char * reason);

    void write(const char * event, json_line & line) { log.write(event, line.end()); }

    // as in the log
    template <typename R> void add(const R & record, std::string_view tail = {}, const std::shared_ptr<const void> & owned = {}) {
        log.add(record, tail, owned);
    }

    // steps under way keep the session open
    void step_begins() { steps++; }
    void step_ends()   { steps--; }
    void wait_for_steps();

  private:
    std::mutex mutex;
    int next_ctx   = 0;
    int next_model = 0;
    std::unordered_map<const llama_context *, std::unique_ptr<context_state>> contexts;
    std::unordered_map<const llama_model *, std::unique_ptr<model_state>>     models;
    std::unordered_map<const llama_context *, std::vector<cache_state>> followed;  // not met yet

    std::atomic<int>  steps { 0 };

    context_state & context_locked(const llama_context * ctx);
    model_state & model_locked(const llama_model * model);
    void write_context(const context_state & state, int model_id);
};

// the open session; opens the one that the environment asks for when there is none yet
std::shared_ptr<session> current_session();
// the same, but opens none
std::shared_ptr<session> open_session_or_null();
// the next part of the log, or `full` when there can be none
std::shared_ptr<session> next_part(std::shared_ptr<session> full);

// A model or a context is about to be freed: no session finds it any more, whoever holds that session. A rotation
// cannot take it over to the next part meanwhile.
void forget_everywhere(const llama_context * ctx);
void forget_everywhere(const llama_model * model);

// a line for the user, on the standard error that the program had before a library redirected it
void tell(const std::string & text);

// what a session is asked for
struct request {
    std::string path;
    std::string level = "detailed";
    std::string args;   // JSON
    std::string stats;  // a pattern
    int32_t     flags = 0;
    held_file::existing found;  // at `path`
    uint64_t    rotate_bytes  = 0;
    bool        removes_parts = false;  // of the log that is replaced
};

// what `instr exec` asks for; without a path, nothing
request request_of_environment();
// session.log, part2 -> session.part2.log
std::string before_suffix(const std::string & path, const std::string & text);
// removes the later parts of the recording whose log `path` was, logs only
void remove_parts(const std::string & path);

// held while a mark is written, so that a rotation cuts every open span in two
std::unique_lock<std::mutex> marks_lock();
void write_mark(session & s, int64_t id, const char * name, const char * phase, int thread);

// the calling thread's line; only one is built at a time
json_line & line_buffer();

// process-wide facts about a model that a session opened later still needs
struct model_load {
    std::string path;
    uint64_t    t_begin = 0;
    uint64_t    dur     = 0;
};
model_load load_of(const llama_model * model);

struct context_types {
    ggml_type k = GGML_TYPE_F16;
    ggml_type v = GGML_TYPE_F16;
};
context_types types_of(const llama_context * ctx);
void forget_facts_lock();  // in the child of a fork

// llama.cpp's memory breakdown as a JSON array of buffer uses
std::string memory_json(const llama_context * ctx);
void write_memory_if_changed(session & s, context_state & state);

// host and process, for session_start
void write_session_start(session & s);
std::string random_id();
uint64_t resident_bytes();
int      thread_id();

// A graph that is about to be computed and was not the last one: known, or written now. `built_layers` is of the
// graph that was just built, if it was.
graph_state & graph_of(session & s, context_state & state, ggml_cgraph * gf, const char * source, bool is_update, const std::unordered_map<const ggml_tensor *, int> * built_layers);

// what the sink holds: layers, ops, splits of compute number `compute`
struct compute_times {
    int    compute;
    uint64_t begin, end;  // ticks
};
void write_kernels(session & s, context_state & state, graph_state & graph, const compute_times & times);

// the scheduler's eval callback that reads the values of matching nodes
bool stats_callback(ggml_tensor * t, bool ask, void * user_data);

// where a node stands in the compute that is under way in this thread
struct node_reference {
    int compute, graph, node, layer;
};
session * computing_session();  // nullptr when none records it
void stop_compute();           // it will be told as aborted
bool find_computed_node(const ggml_tensor * t, node_reference & out);

// written right behind the `compute` event, which the line refers to
void write_after_compute(const char * event, std::string line);

}  // namespace llama_instr
