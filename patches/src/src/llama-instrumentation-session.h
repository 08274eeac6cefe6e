// llama-instrumentation-session.h - a session, and the parts of its log: their numbers, and what they know of contexts
//
// One session is open in a process at a time; contexts and threads share it. A step holds a reference to a part, so
// that a session which another thread ends lives until the step is over.

#pragma once

#include "llama-instrumentation.h"
#include "llama-instrumentation-log.h"
#include "llama-instrumentation-machine.h"
#include "llama-instrumentation-models.h"
#include "llama-instrumentation-writer.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <unordered_map>

namespace [[gnu::visibility("hidden")]] llama_instr {

enum class level { minimal, detailed, verbose };
inline constexpr const char * level_names[] = { "minimal", "detailed", "verbose" };

// what is asked for, by a call or in the environment
struct request {
    std::string path;   // of the first part
    std::string level;
    std::string args;   // JSON
    std::string stats;  // a pattern
    int32_t     flags = 0;
    held_file::existing found;  // at `path`
    uint64_t    rotate_bytes  = 0;
    bool        removes_parts = false;  // of the log that is replaced
};

// a span of the application that has not ended
struct open_mark {
    std::string name;
    int thread;
    int seq;
};

// one session: what the parts of its log have in common
struct session {
    std::string id;
    request     asked;
    std::regex  stats;  // asked.stats
    std::atomic<uint64_t> rotate_bytes { 0 };  // a part ends when it has grown past this; 0: one part only
    // ids count through all parts
    std::atomic<int>  next_step { 0 };
    std::atomic<int>  next_graph { 0 };
    std::atomic<int>  next_plan { 0 };
    std::atomic<int>  next_compute { 0 };
    std::atomic<int>  next_mark { 0 };
    std::atomic<bool> nan_seen { false };
    std::map<int64_t, open_mark> marks;  // with the recorder's lock of marks
    writer files;

    // A model and a context keep their ids in all parts. forget() gives the address free for another one.
    int  id_of(const llama_model * model) { return id_of(model, next_model); }
    int  id_of(const llama_context * ctx) { return id_of(ctx, next_context); }
    void forget(const void * what) {
        std::lock_guard<std::mutex> lock(mutex);
        ids.erase(what);
    }

  private:
    std::mutex mutex;
    int next_model   = 0;
    int next_context = 0;
    std::unordered_map<const void *, int> ids;

    int id_of(const void * what, int & next) {
        std::lock_guard<std::mutex> lock(mutex);
        const auto [entry, is_new] = ids.emplace(what, next);
        next += is_new;
        return entry->second;
    }
};

// One log file: the whole log of a session, or one part of a rotated one. A step holds a reference to the part in which it
// began. Once only the writer refers to a part, it closes its file.
class log_part {
  public:
    std::shared_ptr<session> all;
    int part = 1;

    level       detail = level::detailed;
    log_file    log;
    model_table known { *this };

    // totals
    std::atomic<uint64_t> decode_ticks { 0 };
    std::atomic<uint64_t> overhead_ticks { 0 };
    std::atomic<uint64_t> dropped_ops { 0 };
    std::atomic<uint64_t> ops_under_way { 0 };  // of devices, whose results are not there

    // the devices that were described, with the uncertainty of their clocks
    std::mutex devices_mutex;
    std::map<std::string, uint64_t> devices;

    // the connections that were described
    std::mutex connections_mutex;
    std::set<int> connections;

    // page faults of the process at the last reading; the recorder's thread says when to read them again
    std::atomic<bool> faults_due { true };
    std::atomic<long> minflt { 0 };
    std::atomic<long> majflt { 0 };

    bool has_flag(int32_t flag) const { return (all->asked.flags & flag) != 0; }
    bool reads_values() const { return !all->asked.stats.empty(); }

    bool is_full() const {
        const uint64_t limit = all->rotate_bytes;
        return limit > 0 && (log.size() >= limit || log.has_ended());
    }

    // the first line, which says who records what on which machine
    void write_start();

    // -- called by the writer

    // creates the file, which begins with what was added so far; returns 0 or -errno
    int start(const std::string & path, const held_file::existing & found);

    // the part after this one, not yet started, with the memory of an earlier one
    std::shared_ptr<log_part> next_part(log_file::buffers && memory) const;

    // writes what the machine did since the last call, if there were steps
    void record_machine();

    // the totals and the end of the file, if it is open; returns 0 or -errno
    int close(const char * reason);

    // -- called by any thread

    void write(const char * event, json_line & line) { log.write(event, line.end()); }
    void write_mark(int64_t id, const open_mark & mark, const char * phase);  // with the recorder's lock of marks

    // as log_file::add()
    template <typename R> void add(const R & record, std::string_view tail = {}, const std::shared_ptr<const void> & owned = {}, uint32_t n_lines = 1) {
        log.add(record, tail, owned, n_lines);
    }

    // closing a session waits for the steps and descriptions under way, and counts what it does not wait for as dropped
    void step_begins() {
        steps++;
        worked = true;
    }
    void step_ends() { steps--; }
    void description_begins() { descriptions++; }
    void description_ends() { descriptions--; }
    int  n_under_way() const { return steps + descriptions; }

  private:
    std::atomic<int>  steps { 0 };
    std::atomic<int>  descriptions { 0 };
    std::atomic<bool> worked { false };  // there were steps since the machine was looked at
    machine_counts    machine;
};

//
// the session that is open in this process
//

// the part of the log that is open; opens the session that the environment asks for when there is none yet
std::shared_ptr<log_part> current_part();
// the part that is open; never opens a session, nor waits for one that is opened
std::shared_ptr<log_part> open_part_or_null();
// the part of a step that begins, maybe the next one of the log
std::shared_ptr<log_part> part_of_step();
// the part that is open, for a description of several lines: it is not closed before this pointer is released
std::shared_ptr<log_part> part_of_description();

// what clients and servers of ggml's RPC backend call
extern const ggml_instr_rpc_recorder rpc_recorder;

// Opens the log that the environment asks for. From now on the signals by which a server ends close it first: SIGINT,
// SIGTERM, SIGHUP, and SIGPIPE when a client has gone.
void close_at_signals();

// why ggml ends the process now, for the user and for llama_instr_error()
void tell_reason(const std::string & text);

// Forgets a model or a context that is about to be freed, in every part too. A rotation cannot copy it to the next part
// meanwhile.
void forget_everywhere(const void * what);

}  // namespace llama_instr
