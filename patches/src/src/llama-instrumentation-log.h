// llama-instrumentation-log.h - the log's file: whole lines in, in order, from any thread
//
// Invariant: whatever happens to the disk or to the process, the file on disk is a sequence of whole
// lines, followed at most by one that a kill cut off. A line that cannot be written is counted.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace llama_instr {

class log_file {
  public:
    ~log_file();

    // creates `path`; returns 0 or -errno. An existing regular file is an error unless `overwrite`
    int open(const char * path, bool overwrite);

    // adds a line of the event `event`, a literal
    void write(const char * event, const std::string & line);

    // hands to the kernel what is older than `flush_interval_ns`
    void flush_if_due(uint64_t now);
    void flush();

    // writes the last line, which `make` builds from the totals, and closes; returns 0 or -errno
    struct totals {
        struct event_count {
            const char * event;
            uint64_t     lines;
        };
        std::vector<event_count> events;
        uint64_t bytes   = 0;
        uint64_t dropped = 0;
    };
    template <typename F> int close(F make) {
        std::lock_guard<std::mutex> lock(mutex);
        if (fd < 0) {
            return 0;
        }
        flush_locked();
        const std::string line = make(summary);
        return close_locked(line);
    }

    // forgets the file without writing: for a child that inherited it through fork()
    void abandon();

    const std::string & path() const { return name; }

    // errno of the first write that failed, 0 when none did
    int      failed() const { return error; }
    uint64_t dropped();

  private:
    static constexpr size_t   flush_bytes       = 64 * 1024;
    static constexpr uint64_t flush_interval_ns = 20 * 1000 * 1000;
    // bytes given back when the disk is full, so that the last line still finds room
    static constexpr size_t   last_line_room    = 4096;

    std::mutex  mutex;
    std::string name;
    int         fd      = -1;
    bool        regular = false;
    std::atomic<int> error { 0 };
    std::string pending;
    uint64_t    last_flush = 0;
    uint64_t    offset     = 0;  // of `pending` in the file
    totals      summary;

    void   flush_locked();
    size_t write_some(const char * data, size_t size);
    void   give_up(size_t written);
    int    close_locked(const std::string & last_line);
    void   drop_lines(const char * data, size_t size);
    totals::event_count & count_of(const char * event);
    totals::event_count & count_of(const char * event, size_t length);
};

}  // namespace llama_instr
