// llama-instrumentation-log.h - the log's file: events in, in order, from any thread
//
// Invariant: whatever happens to the disk or to the process, the file on disk is a sequence of whole
// lines, followed at most by one that a kill cut off. A line that cannot be written is counted.
//
// What comes with every decode is taken as a record and becomes lines only when the file is written to,
// many decodes at once: between two decodes of a model the caches hold the model's weights, so that code
// and tables that run once a decode run cold.

#pragma once

#include "llama-instrumentation-file.h"
#include "llama-instrumentation-json.h"
#include "llama-instrumentation-ticks.h"

#include "ggml-instrumentation.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <sys/uio.h>
#include <type_traits>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

// lines under way to the file, counted by event
class log_lines {
  public:
    struct event_count {
        const char * event;
        uint64_t     lines;
    };

    // a line of the event `event`, a literal; end() closes it
    json_line & begin(const char * event, uint64_t t) {
        count_of(event).lines++;
        return line.begin_next(event, t);
    }

    // Room for `n` numbers, until the next call. Not a thread's own: at the end of the process its thread-locals
    // are gone before the last lines are formatted.
    uint64_t * scratch(size_t n) {
        if (numbers.size() < n) {
            numbers.resize(n);
        }
        return numbers.data();
    }

    json_line line;
    std::vector<event_count> counts;
    const tick_clock * clock = nullptr;  // the log's

    event_count & count_of(const char * event);
    event_count & count_of(const char * event, size_t length);

  private:
    std::vector<uint64_t> numbers;
};

class log_file {
  public:
    // creates `path` as held_file::create() does; returns 0 or -errno
    int open(const char * path, const held_file::existing & found);

    // Writes what was added so far and gives the file its name. Returns 0 or -errno: then there is no new file.
    int begin();

    // is called once, with the lock held, when something cannot be written
    std::function<void(int error)> on_failure;

    // adds a line of the event `event`, a literal; one that is too long for a reader is dropped
    void write(const char * event, std::string_view line);

    // Adds a record, which `record.format(tail, lines)` turns into lines later, and in any thread: what it
    // points to must live until the next flush(). The tail is kept aligned like the record.
    template <typename R> void add(const R & record, std::string_view tail = {}) {
        static_assert(std::is_trivially_copyable_v<R>, "it is copied byte by byte");
        static_assert(alignof(R) == alignment, "so that what stands behind it is aligned");
        static_assert(sizeof(entry) % alignment == 0, "so that what stands behind it is aligned");
        const format_fn format = [](const char * data, size_t size, log_lines & lines) {
            ((const R *) data)->format(std::string_view(data + sizeof(R), size - sizeof(R)), lines);
        };
        add_entry(format, &record, sizeof(R), tail);
    }

    // Hands to the kernel what is older than `flush_interval_ns`, or more than `flush_bytes`; `now` in ticks. The
    // team, which would only wait for the next compute, shares the work.
    void flush_if_due(uint64_t now, const ggml_instr_team & team);
    bool is_due(uint64_t since, uint64_t now) const { return now > since && now - since >= flush_interval; }
    // what was there already when it was asked for the last time
    void flush_if_idle();
    void flush(const ggml_instr_team & team = {});

    // writes the last line, which `make` builds from the totals, and closes; returns 0 or -errno
    struct totals {
        std::vector<log_lines::event_count> events;
        uint64_t bytes;
        uint64_t dropped;
        tick_scale scale;
    };
    template <typename F> int close(F make) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!file.is_open()) {
            return 0;
        }
        flush_locked();
        const std::string line = make(totals { count_events(), bytes, n_dropped, clock.whole() });
        return close_locked(line);
    }

    // forgets the file without writing: for a child that inherited it through fork()
    void abandon();

    const std::string & path() const { return name; }

    // errno of the first write that failed, 0 when none did
    int      failed() const { return error; }
    uint64_t dropped();

    uint64_t size() const { return bytes; }  // written
    bool is_regular() const { return file.is_regular(); }

  private:
    using format_fn = void (*)(const char * data, size_t size, log_lines & lines);

    // in front of every entry of `pending`
    struct entry {
        format_fn format;
        size_t    size;
    };

    static constexpr size_t alignment = 8;
    static constexpr size_t aligned(size_t n) { return (n + alignment - 1) / alignment * alignment; }

    // in large pieces: a file's pages cost the kernel less in larger folios
    static constexpr size_t   flush_bytes       = 1024 * 1024;
    // the same inside of a step, which may be long
    static constexpr size_t   most_bytes        = 2 * flush_bytes;
    // a team's threads get whole chunks
    static constexpr size_t   chunk_bytes       = 16 * 1024;
    static constexpr uint64_t flush_interval_ns = 100 * 1000 * 1000;
    // bytes given back when the disk is full, so that the last line still finds room
    static constexpr size_t   last_line_room    = 4096;

    std::mutex  mutex;
    std::string name;
    held_file   file;
    std::atomic<int> error { 0 };
    text_buffer pending;  // entries
    std::vector<size_t>   chunks;  // of `pending`: where every `chunk_bytes` of entries begin
    std::deque<log_lines> parts;   // what they were formatted to, one for each thread of a team
    std::vector<iovec>    pieces;
    tick_clock  clock;
    uint64_t    last_flush     = 0;  // ticks
    std::atomic<uint64_t> flush_interval { 0 };
    uint64_t    added      = 0;  // entries so far
    uint64_t    added_seen = 0;  // by flush_if_idle()
    uint64_t    offset     = 0;  // of the next line in the file
    std::atomic<uint64_t> bytes { 0 };  // written
    uint64_t    n_dropped  = 0;

    std::vector<log_lines::event_count> count_events();

    // one copy for all kinds of records: the first to be added in a decode brings the code into the cache
    void   add_entry(format_fn format, const void * record, size_t size, std::string_view tail);
    void   read_clock();
    void   flush_locked(const ggml_instr_team & team = {});
    void   format_chunks(size_t first, size_t last, log_lines & lines);
    void   write_parts();
    size_t write_some(iovec * piece, size_t n_pieces);
    size_t give_up(size_t written);
    void   fail(int reason);
    int    close_locked(const std::string & last_line);
    void   drop_lines(log_lines & lines, const char * data, size_t size);
};

}  // namespace llama_instr
