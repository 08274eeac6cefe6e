// llama-instrumentation-session.h - a session, and the parts of its log: their numbers, and what they know of contexts
//
// One session is open in a process at a time; contexts and threads share it. A step holds a reference to a part, so
// that a session which another thread ends lives until the step is over.

#pragma once

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
#include <string>
#include <unordered_map>

namespace [[gnu::visibility("hidden")]] llama_instr {

enum class level { minimal, detailed, verbose };
inline constexpr const char * level_names[] = { "minimal", "detailed", "verbose" };

bool parse_level(const char * text, level & out);

// a span of the application that has not ended
struct open_mark {
    std::string name;
    int thread;
    int seq;
};

// one session: what the parts of its log have in common
struct session {
    std::string id;
    std::string path;  // of the first part
    std::string args;
    std::atomic<uint64_t> rotate_bytes { 0 };  // a part ends when it has grown past this; 0: one part only
    // ids count through all parts
    std::atomic<int>  next_step { 0 };
    std::atomic<int>  next_graph { 0 };
    std::atomic<int>  next_plan { 0 };
    std::atomic<int>  next_compute { 0 };
    std::atomic<int>  next_mark { 0 };
    std::atomic<bool> nan_seen { false };
    std::map<int64_t, open_mark> marks;  // with the lock of marks_lock()
    writer files;

    // A model and a context keep their ids in all parts. forget() gives the address free for another one.
    int  id_of(const llama_model * model) { return ids_of_models.of(model); }
    int  id_of(const llama_context * ctx) { return ids_of_contexts.of(ctx); }
    void forget(const llama_model * model) { ids_of_models.forget(model); }
    void forget(const llama_context * ctx) { ids_of_contexts.forget(ctx); }

  private:
    class id_table {
      public:
        int of(const void * what) {
            std::lock_guard<std::mutex> lock(mutex);
            const auto [entry, is_new] = ids.emplace(what, next);
            next += is_new;
            return entry->second;
        }

        void forget(const void * what) {
            std::lock_guard<std::mutex> lock(mutex);
            ids.erase(what);
        }

      private:
        std::mutex mutex;
        int next = 0;
        std::unordered_map<const void *, int> ids;
    };

    id_table ids_of_models;
    id_table ids_of_contexts;
};

// One log file: the whole log of a session, or one part of a rotated one. A step holds a reference to the part in which it
// began. Once only the writer refers to a part, it closes its file.
class log_part {
  public:
    std::shared_ptr<session> all;
    int part = 1;

    // what was asked for
    level       detail = level::detailed;
    int32_t     flags  = 0;
    std::string stats_pattern;
    std::regex  stats;

    log_file    log;
    model_table known { *this };

    // totals
    std::atomic<uint64_t> decode_ticks { 0 };
    std::atomic<uint64_t> overhead_ticks { 0 };
    std::atomic<uint64_t> dropped_ops { 0 };

    // page faults of the process at the last reading; the recorder's thread says when to read them again
    std::atomic<bool> faults_due { true };
    std::atomic<long> minflt { 0 };
    std::atomic<long> majflt { 0 };

    bool reads_values() const { return !stats_pattern.empty(); }
    bool is_debugged() const;  // a debugger may stop its computes

    bool is_full() const {
        const uint64_t limit = all->rotate_bytes;
        return limit > 0 && (log.size() >= limit || log.has_ended());
    }

    // the first line, which says who records what on which machine
    void write_start();

    // -- called by the writer

    // creates the file, which begins with what was added so far; returns 0 or -errno
    int start(const std::string & path, const held_file::existing & found);

    // the part after this one, not yet started
    std::shared_ptr<log_part> next_part() const;

    // writes what the machine did since the last call, if there were steps
    void record_machine();

    // the totals and the end of the file, if it is open; returns 0 or -errno
    int close(const char * reason);

    // -- called by any thread

    void write(const char * event, json_line & line) { log.write(event, line.end()); }
    void write_mark(int64_t id, const open_mark & mark, const char * phase);  // with the lock of marks_lock()

    // as log_file::add()
    template <typename R> void add(const R & record, std::string_view tail = {}, const std::shared_ptr<const void> & owned = {}, uint32_t n_lines = 1) {
        log.add(record, tail, owned, n_lines);
    }

    // closing a session waits for the steps under way, and counts what it does not wait for as dropped
    void step_begins() {
        steps++;
        worked = true;
    }
    void step_ends() { steps--; }
    bool has_steps() const { return steps > 0; }

  private:
    std::atomic<int>  steps { 0 };
    std::atomic<bool> worked { false };  // there were steps since the machine was looked at
    machine_counts    machine;
};

}  // namespace llama_instr
