// llama-instrumentation-log.h - the log's file: events in, in order, from any thread
//
// Invariant: whatever happens to the disk or to the process, the file on disk is a sequence of whole
// lines, followed at most by one that a kill cut off. A line that cannot be written is counted.
//
// A thread that decodes only copies a record, under a lock that is held just for the copy. One other thread, the
// writer's, takes all records at once, formats them and writes the lines. If it is held up for so long that too much
// waits, the log ends there: what comes later is dropped and counted.

#pragma once

#include "llama-instrumentation-file.h"
#include "llama-instrumentation-json.h"
#include "llama-instrumentation-ticks.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <map>
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
        std::string_view event;  // a literal
        uint64_t         lines;
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

    event_count & count_of(std::string_view event);

    // Records of which many become one line: `format` gets those of the same `key` once no more are at hand.
    using format_many = void (*)(const void * records, size_t n, log_lines & lines);
    template <typename R> void gather(int key, format_many format, const R & record) {
        static_assert(std::is_trivially_copyable_v<R> && sizeof(R) % sizeof(uint64_t) == 0, "it is kept as words");
        gather_words(key, format, (const uint64_t *) &record, sizeof(R) / sizeof(uint64_t));
    }
    void format_gathered(int key);
    void format_gathered();  // of all keys

  private:
    struct gathered {
        format_many format;
        size_t      n = 0;
        std::vector<uint64_t> words;
    };
    static constexpr size_t most_gathered = 4096;  // so that no line is too long

    std::vector<uint64_t>   numbers;
    std::map<int, gathered> of_keys;

    void gather_words(int key, format_many format, const uint64_t * words, size_t n);
};

// pieces of any log that were written: a writer that does not add to them is held up
inline std::atomic<uint64_t> pieces_written { 0 };

class log_file {
  public:
    // -- called by one thread, which may have to wait for the disk or for the reader of a pipe

    // Creates `path` as held_file::create() does, writes what was added so far and gives the file its name. Returns 0
    // or -errno; on an error there is no new file.
    int open(const char * path, const held_file::existing & found);

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
    int close(const std::function<std::string(const totals & totals)> & make);

    // removes the new file
    void discard() { file.discard(); }

    // The memory for what was added and for its lines. The parts of a log hand it on: whichever thread adds would allocate
    // it again for each part, in the end in the heaps of all threads.
    struct buffers {
        std::string added;
        std::string taken;
        json_line   line;
    };
    buffers release();               // of a log that is closed
    void    reuse(buffers && other);  // by a log to which nothing was added

    // -- called by any thread

    // called once, when something cannot be written
    std::function<void(int error)> on_failure;
    // called when so much waits that it should be written soon
    std::function<void()> on_much;

    // adds a line of the event `event`, a literal; one that is too long for a reader is dropped
    void write(const char * event, std::string_view line);

    // Adds a record, which `record.format(tail, lines)` turns into lines later, in another thread. The log keeps `owned`
    // until then: a record may point into it, and at literals. The tail is aligned like the record.
    template <typename R> void add(const R & record, std::string_view tail = {}, const std::shared_ptr<const void> & owned = {}, uint32_t n_lines = 1) {
        static_assert(std::is_trivially_copyable_v<R>, "it is copied byte by byte");
        static_assert(alignof(R) == alignment, "so that what follows it is aligned");
        static_assert(sizeof(entry) % alignment == 0, "so that what follows it is aligned");
        const format_fn format = [](const char * data, size_t size, log_lines & lines) {
            ((const R *) data)->format(std::string_view(data + sizeof(R), size - sizeof(R)), lines);
        };
        add_entry(format, std::string_view((const char *) &record, sizeof(R)), tail, owned, n_lines);
    }

    // counts events that are not written
    void drop(uint64_t n) { n_dropped += n; }

    // forgets the file without writing: for a child of fork()
    void abandon();

    const std::string & path() const { return name; }

    // the log cannot be written; calls on_failure the first time
    void fail(int reason);

    int      failed() const { return error; }  // errno of the first failure, 0 when there was none
    uint64_t dropped() const { return n_dropped; }
    bool     has_ended() const { return error == ETIMEDOUT; }  // too much waited
    uint64_t unwritten() const { return n_dropped + waiting; }

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
        uint32_t  size;
        uint32_t  n_lines;
    };

    static constexpr size_t alignment = 8;
    static constexpr size_t aligned(size_t n) { return (n + alignment - 1) / alignment * alignment; }

    // bytes of lines per write: as many as a pipe holds
    static constexpr size_t write_bytes = 64 * 1024;
    // bytes that wait: from here on they are written at once, and more than so many are dropped
    static constexpr size_t much_bytes  = 8 * 1024 * 1024;
    static constexpr size_t most_bytes  = 32 * 1024 * 1024;
    // bytes given back when the disk is full, so that the last line still finds room
    static constexpr size_t last_line_room = 4096;

    std::string      name;
    std::atomic<int>  error { 0 };
    std::atomic<bool> told { false };  // the error
    std::atomic<uint64_t> bytes { 0 };  // written
    std::atomic<uint64_t> n_dropped { 0 };
    std::atomic<uint64_t> waiting { 0 };  // lines that were added and not yet written

    std::mutex adding;  // guards the next three; nothing waits while it is held
    batch      added;
    bool       accepts = true;   // too much has not waited yet
    bool       closed  = false;  // what is added now is later than the log, and not counted

    // the writer's
    batch      taken;
    held_file  file;
    log_lines  lines;
    tick_clock clock;
    uint64_t   spent  = 0;
    bool       broken = false;  // a write has failed

    // one copy for all kinds of records
    void   add_entry(format_fn format, std::string_view record, std::string_view tail, const std::shared_ptr<const void> & owned, uint32_t n_lines);
    void   take(bool last);
    void   write_taken();
    void   write_lines();
    size_t write_some(std::string_view text);
    void   give_up(std::string_view text, size_t written);
    std::string last_lines(size_t n);
    void   note(int reason);
    void   drop_lines(std::string_view text);
};

}  // namespace llama_instr
