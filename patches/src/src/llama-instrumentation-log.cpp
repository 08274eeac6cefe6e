// llama-instrumentation-log.cpp - see the header for the invariant that it keeps

#include "llama-instrumentation-log.h"

#include "llama-instrumentation-schema.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <unistd.h>
#include <utility>

namespace llama_instr {

int log_file::open(const char * path, const held_file::existing & found) {
    name = path;
    lines.clock = &clock;
    clock.add(moment::now());
    int status = file.create(path, found);
    if (status == 0) {
        take(false);
        write_taken();
        status = is_regular() && broken ? -error : file.commit();
    }
    if (status != 0) {
        file.discard();
    }
    return status;
}

namespace {

// an entry that is a line already
struct alignas(8) whole_line {
    const char * event;

    void format(std::string_view text, log_lines & lines) const {
        lines.count_of(event).lines++;
        lines.line.append(text);
    }
};

}  // namespace

void log_file::write(const char * event, std::string_view line) {
    if (line.size() > LLAMA_INSTR_MAX_LINE) {
        n_dropped++;
        return;
    }
    add(whole_line { event }, line);
}

void log_file::add_entry(format_fn format, std::string_view record, std::string_view tail, const std::shared_ptr<const void> & owned, uint32_t n_lines) {
    const entry  head = { format, (uint32_t) (record.size() + tail.size()), n_lines };
    const size_t size = sizeof(head) + aligned(head.size);
    size_t before;
    bool   overflows;
    {
        std::lock_guard<std::mutex> lock(adding);
        if (closed) {
            return;
        }
        before    = added.entries.size();
        overflows = accepts && before + size > most_bytes;
        accepts   = accepts && !overflows;
        if (accepts) {
            added.entries.append((const char *) &head, sizeof(head)).append(record).append(tail);
            added.entries.resize(before + size);
            if (owned && (added.owned.empty() || added.owned.back() != owned)) {
                added.owned.push_back(owned);
            }
            waiting += n_lines;
        } else {
            n_dropped += n_lines;
        }
    }
    if (overflows) {
        fail(ETIMEDOUT);
    } else if (before < much_bytes && before + size >= much_bytes && on_much) {
        on_much();
    }
}

log_file::buffers log_file::release() {
    std::lock_guard<std::mutex> lock(adding);
    return { std::move(added.entries), std::move(taken.entries), std::move(lines.line) };
}

void log_file::reuse(buffers && other) {
    added.entries = std::move(other.added);
    taken.entries = std::move(other.taken);
    lines.line    = std::move(other.line);
}

void log_file::flush() {
    take(false);
    if (!taken.entries.empty()) {
        write_taken();
    }
}

void log_file::abandon() {
    // the parent's other threads do not exist here and may have held the lock: do not take it
    accepts = false;
    file.close();
}

void log_file::take(bool last) {
    std::lock_guard<std::mutex> lock(adding);
    std::swap(added, taken);
    closed = last;
}

void log_file::write_taken() {
    // read after the records were taken, so that none of them is later
    const moment now = moment::now();
    clock.add(now);
    uint64_t formatted = 0;
    const auto write = [&] {
        write_lines();
        waiting -= std::exchange(formatted, 0);
    };
    for (size_t at = 0; at < taken.entries.size();) {
        entry head;
        memcpy(&head, &taken.entries[at], sizeof(head));
        head.format(&taken.entries[at + sizeof(head)], head.size, lines);
        formatted += head.n_lines;
        at += sizeof(head) + aligned(head.size);
        if (lines.line.lines().size() >= write_bytes) {
            write();
        }
    }
    lines.format_gathered();
    write();
    taken.entries.clear();
    taken.owned.clear();
    spent += ticks_now() - now.ticks;
}

void log_file::write_lines() {
    const std::string_view text = lines.line.lines();
    if (broken) {
        drop_lines(text);
    } else if (const size_t written = write_some(text); written < text.size()) {
        give_up(text, written);
    } else {
        bytes += written;
    }
    if (broken) {
        fail(error);
    }
    lines.line.clear();
}

// Returns the bytes written. The writer's thread blocks SIGPIPE and SIGXFSZ.
size_t log_file::write_some(std::string_view text) {
    size_t written = 0;
    while (written < text.size() && !broken) {
        const auto n = ::write(file.get(), text.data() + written, std::min(text.size() - written, write_bytes));
        pieces_written++;
        broken = n < 0 && errno != EINTR;
        if (broken) {
            note(errno);
        }
        written += n > 0 ? (size_t) n : 0;
    }
    return written;
}

// The disk is full, or the reader has gone: cuts the file back to whole lines, so far that the last line finds room, and
// drops the rest. The first `written` bytes of the text are in the file.
void log_file::give_up(std::string_view text, size_t written) {
    const size_t room    = is_regular() ? last_line_room : 0;
    const auto   earlier = written < room ? last_lines(room - written) : std::string();
    const size_t kept    = text.substr(0, written - std::min(written, room)).rfind('\n') + 1;  // npos + 1 is 0
    drop_lines(earlier);
    drop_lines(text.substr(kept));
    bytes = bytes + kept - earlier.size();
    if (is_regular()) {
        (void) !ftruncate(file.get(), (off_t) bytes);
    }
}

// Reads whole lines from the end of the file, of at least `n` bytes; none if that would be all.
std::string log_file::last_lines(size_t n) {
    std::string found;
    for (size_t size = n; size < bytes;) {
        size = std::min<size_t>(2 * size, bytes);
        found.resize(size);
        if (pread(file.get(), &found[0], size, (off_t) (bytes - size)) != (ssize_t) size) {
            break;
        }
        const size_t begin = found.rfind('\n', size - n - 1) + 1;
        if (begin > 0) {
            return found.substr(begin);
        }
    }
    return std::string();
}

void log_file::note(int reason) {
    int none = 0;
    error.compare_exchange_strong(none, reason);
}

void log_file::fail(int reason) {
    note(reason);
    if (on_failure && !told.exchange(true)) {
        on_failure(error);
    }
}

void log_file::drop_lines(std::string_view text) {
    static const char prefix[] = "{\"event\":\"";
    while (!text.empty()) {
        const std::string_view event = text.substr(sizeof(prefix) - 1);
        lines.count_of(event.substr(0, event.find('"'))).lines--;  // it was counted before
        n_dropped++;
        text.remove_prefix(text.find('\n') + 1);
    }
}

int log_file::close(const std::function<std::string(const totals & totals)> & make) {
    if (!file.is_open()) {
        return 0;
    }
    take(true);
    write_taken();
    const std::string last_line = make({ lines.counts, bytes, n_dropped, spent, clock.whole() });
    const bool reader_gone = broken && !is_regular();
    broken = false;
    if (!reader_gone && write_some(last_line) != last_line.size() && is_regular()) {
        // a session_end that is cut off would look like a kill; without one the log is only unclosed
        (void) !ftruncate(file.get(), (off_t) bytes);
    }
    if (const int status = file.close(); status != 0) {
        note(-status);
    }
    if (error != 0) {
        fail(error);
    }
    return -error;
}

void log_lines::gather_words(int key, format_many format, const uint64_t * words, size_t n) {
    gathered & of = of_keys[key];
    of.format = format;
    of.words.insert(of.words.end(), words, words + n);
    if (++of.n == most_gathered) {
        format_gathered(key);
    }
}

void log_lines::format_gathered(int key) {
    if (const auto found = of_keys.find(key); found != of_keys.end()) {
        found->second.format(found->second.words.data(), found->second.n, *this);
        of_keys.erase(found);
    }
}

void log_lines::format_gathered() {
    while (!of_keys.empty()) {
        format_gathered(of_keys.begin()->first);
    }
}

log_lines::event_count & log_lines::count_of(std::string_view event) {
    const auto is_of = [event](const event_count & count) { return count.event == event; };
    const auto found = std::find_if(counts.begin(), counts.end(), is_of);
    return found != counts.end() ? *found : counts.emplace_back(event_count { event, 0 });
}

}  // namespace llama_instr
