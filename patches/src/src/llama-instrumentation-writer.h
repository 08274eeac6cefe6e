// llama-instrumentation-writer.h - the thread that opens, writes and closes the parts of a log
//
// Invariant: no other thread touches a file. When a disk or the reader of a pipe stalls, only this thread is held up: a
// thread that decodes never waits for it, and one that opens or closes a log waits for a bounded time.

#pragma once

#include "llama-instrumentation-log.h"

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

class log_part;

class writer {
  public:
    // Starts the thread, which opens the first part and holds a reference to all of them. Returns 0 or -errno.
    int open(std::shared_ptr<log_part> first, const std::string & path, const held_file::existing & found);

    // Closes all parts, the last one for this reason. Returns 0 or -errno; after -ETIMEDOUT the thread may still do so.
    int close(const char * reason);

    // what was added so far is in the file then, unless it cannot be written
    void flush();

    // what was added so far will be written soon
    void wake();

    // The next part, once the thread has made it; a first call asks for it.
    std::shared_ptr<log_part> next();

  private:
    using parts = std::vector<std::shared_ptr<log_part>>;

    std::mutex mutex;  // guards what follows; nothing waits for a file while it is held
    std::condition_variable work, done;
    bool     woken     = false;
    bool     opened    = false;
    bool     abandoned = false;  // no thread waits for it to open
    bool     closed    = false;
    int      status    = 0;      // of opening, then of closing
    uint64_t asked     = 0;      // calls of flush() so far
    uint64_t flushed   = 0;
    uint64_t stalled_at = UINT64_MAX;  // pieces that were written when a wait was given up
    const char * close_reason = nullptr;
    bool     wants_part = false;
    std::shared_ptr<log_part> part;  // the next one
    log_file::buffers spare;  // of the last part that was closed; the thread's

    void run(std::shared_ptr<log_part> first, const std::string & path, const held_file::existing & found);
    void take_turn(parts & open, bool due);
    void make_part(parts & open);
    int  close_all(parts & open, const char * reason);
    template <typename F> bool wait_until(std::unique_lock<std::mutex> & lock, int patience, F is_done);
};

}  // namespace llama_instr
