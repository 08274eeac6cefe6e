// llama-instrumentation-log.h - the log's file: events in, in order, from any thread
//
// Invariant: whatever happens to the disk or to the process, the file on disk is a sequence of whole
// lines, followed at most by one that a kill cut off. A line that cannot be written is counted.
//
// A thread that decodes only copies a record, under a lock that is held just for the copy. The recorder's thread
// takes all records at once, formats them and writes the lines.

#pragma once

#include "llama-instrumentation-file.h"
#include "llama-instrumentation-json.h"
#include "llama-instrumentation-ticks.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
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

    // room for `n` numbers, until the next call
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
    event_count * find(std::string_view event);

  private:
    std::vector<uint64_t> numbers;
};

class log_file {
  public:
    // creates `path` as held_file::create() does; returns 0 or -errno
    int open(const char * path, const held_file::existing & found);

    // Writes what was added so far and gives the file its name. Returns 0 or -errno; on an error there is no new file.
    int begin();

    // called once, by the thread that writes, when something cannot be written
    std::function<void(int error)> on_failure;

    // adds a line of the event `event`, a literal; one that is too long for a reader is dropped
    void write(const char * event, std::string_view line);

    // Adds a record, which `record.format(tail, lines)` turns into lines later, in another thread. The log keeps `owned`
    // until then: a record may point into it, and at literals. The tail is aligned like the record.
    template <typename R> void add(const R & record, std::string_view tail = {}, const std::shared_ptr<const void> & owned = {}) {
        static_assert(std::is_trivially_copyable_v<R>, "it is copied byte by byte");
        static_assert(alignof(R) == alignment, "so that what follows it is aligned");
        static_assert(sizeof(entry) % alignment == 0, "so that what follows it is aligned");
        const format_fn format = [](const char * data, size_t size, log_lines & lines) {
            ((const R *) data)->format(std::string_view(data + sizeof(R), size - sizeof(R)), lines);
        };
        add_entry(format, std::string_view((const char *) &record, sizeof(R)), tail, owned);
    }

    // writes what was added so far
    void flush();

    // writes the last line, which `make` builds from the totals, and closes; returns 0 or -errno
    struct totals {
        std::vector<log_lines::event_count> events;
        uint64_t bytes;
        uint64_t dropped;
        uint64_t spent;  // formatting and writing, in ticks
        tick_scale scale;
    };
    template <typename F> int close(F make) {
        std::lock_guard<std::mutex> lock(writing);
        if (!file.is_open()) {
            return 0;
        }
        take(false);
        write_taken();
        const std::string line = make(totals { lines.counts, bytes, n_dropped, spent, clock.whole() });
        return close_file(line);
    }

    // forgets the file without writing: for a child of fork()
    void abandon();

    const std::string & path() const { return name; }

    // errno of the first write that failed, 0 when none did
    int      failed() const { return error; }
    uint64_t dropped() const { return n_dropped; }

    uint64_t size() const { return bytes; }  // written
    bool is_regular() const { return file.is_regular(); }

  private:
    using format_fn = void (*)(const char * data, size_t size, log_lines & lines);

    // what was added and not yet written
    struct batch {
        std::string entries;
        std::vector<std::shared_ptr<const void>> owned;
    };

    // in front of every record
    struct entry {
        format_fn format;
        size_t    size;
    };

    static constexpr size_t alignment = 8;
    static constexpr size_t aligned(size_t n) { return (n + alignment - 1) / alignment * alignment; }

    // bytes of lines per write: large writes cost the kernel less
    static constexpr size_t write_bytes = 1024 * 1024;
    // when so many bytes wait for the recorder's thread, the thread that adds the next record writes them
    static constexpr size_t most_bytes  = 8 * 1024 * 1024;
    // bytes given back when the disk is full, so that the last line still finds room
    static constexpr size_t last_line_room = 4096;

    std::string      name;
    std::atomic<int> error { 0 };
    std::atomic<uint64_t> bytes { 0 };  // written
    std::atomic<uint64_t> n_dropped { 0 };

    std::mutex adding;  // guards `added` and `accepts`; nothing waits while it is held
    batch      added;
    bool       accepts = false;

    std::mutex writing;  // guards the rest; locked before `adding`
    batch      taken;
    held_file  file;
    log_lines  lines;
    tick_clock clock;
    uint64_t   spent = 0;

    // one copy for all kinds of records
    void   add_entry(format_fn format, std::string_view record, std::string_view tail, const std::shared_ptr<const void> & owned);
    void   take(bool accepts_more);
    void   write_taken();
    void   write_lines();
    size_t write_some(std::string_view text);
    size_t give_up(std::string_view text, size_t written);
    void   fail(int reason);
    int    close_file(const std::string & last_line);
    void   drop_lines(std::string_view text);
};

}  // namespace llama_instr
