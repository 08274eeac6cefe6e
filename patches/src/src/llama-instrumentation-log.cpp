// llama-instrumentation-log.cpp - see the header for the invariant that it keeps

#include "llama-instrumentation-log.h"

#include "llama-instrumentation-schema.h"

#include "ggml-instrumentation.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sys/uio.h>
#include <unistd.h>
#include <utility>

namespace llama_instr {

namespace {

// A reader that went away must not take the program with it: SIGPIPE is kept from this thread while
// it writes to something that is not a file, and one that this write has caused is taken back.
class sigpipe_guard {
  public:
    explicit sigpipe_guard(bool enable) : active(enable) {
        if (!active) {
            return;
        }
        sigemptyset(&pipe_set);
        sigaddset(&pipe_set, SIGPIPE);
        sigset_t pending;
        sigpending(&pending);
        active = sigismember(&pending, SIGPIPE) == 0;
        if (active) {
            pthread_sigmask(SIG_BLOCK, &pipe_set, &previous);
        }
    }

    ~sigpipe_guard() {
        if (!active) {
            return;
        }
#ifdef __APPLE__
        sigset_t pending;
        sigpending(&pending);
        if (sigismember(&pending, SIGPIPE)) {
            int signal_number;
            sigwait(&pipe_set, &signal_number);
        }
#else
        const struct timespec now = { 0, 0 };
        while (sigtimedwait(&pipe_set, nullptr, &now) < 0 && errno == EINTR) {
        }
#endif
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }

  private:
    bool     active;
    sigset_t pipe_set;
    sigset_t previous;
};

}  // namespace

int log_file::open(const char * path, const held_file::existing & found) {
    std::lock_guard<std::mutex> lock(mutex);
    const int status = file.create(path, found);
    if (status == 0) {
        name = path;
        read_clock();
        pending.room(most_bytes);
    } else {
        file.close();
    }
    return status;
}

int log_file::begin() {
    std::lock_guard<std::mutex> lock(mutex);
    flush_locked();
    const int status = is_regular() && error != 0 ? -error : file.commit();
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
        std::lock_guard<std::mutex> lock(mutex);
        n_dropped++;
        return;
    }
    add(whole_line { event }, line);
}

[[gnu::hot]] void log_file::add_entry(format_fn format, const void * record, size_t size, std::string_view tail) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!file.is_open()) {
        return;
    }
    if (chunks.empty() || pending.size() - chunks.back() >= chunk_bytes) {
        chunks.push_back(pending.size());
    }
    char * const at = pending.room(sizeof(entry) + size + aligned(tail.size()));
    const entry head = { format, size + tail.size() };
    memcpy(at, &head, sizeof(entry));
    memcpy(at + sizeof(entry), record, size);
    tail.copy(at + sizeof(entry) + size, tail.size());
    pending.advance(sizeof(entry) + aligned(head.size));
    added++;
    if (pending.size() >= most_bytes) {
        flush_locked();
    }
}

[[gnu::hot]] void log_file::flush_if_due(uint64_t now, const ggml_instr_team & team) {
    std::lock_guard<std::mutex> lock(mutex);
    if (file.is_open() && (is_due(last_flush, now) || pending.size() >= flush_bytes)) {
        flush_locked(team);
    }
}

void log_file::flush_if_idle() {
    std::lock_guard<std::mutex> lock(mutex);
    if (file.is_open() && pending.size() > 0 && added == added_seen) {
        flush_locked();
    }
    added_seen = added;
}

void log_file::flush(const ggml_instr_team & team) {
    std::lock_guard<std::mutex> lock(mutex);
    if (file.is_open()) {
        flush_locked(team);
    }
}

uint64_t log_file::dropped() {
    std::lock_guard<std::mutex> lock(mutex);
    return n_dropped;
}

void log_file::abandon() {
    // the other threads of the parent do not exist here and may have held the mutex: do not take it
    file.close();
}

void log_file::read_clock() {
    const moment now = moment::now();
    clock.add(now);
    last_flush = now.ticks;
    flush_interval = clock.whole().ticks(flush_interval_ns);
}

void log_file::flush_locked(const ggml_instr_team & team) {
    read_clock();
    // one thread for what one does as fast
    const int32_t n = team.run && chunks.size() > 1 ? team.n_threads : 1;
    while (parts.size() < (size_t) n) {
        parts.emplace_back();
        parts.back().clock = &clock;
    }
    struct work {
        log_file * self;
        size_t     n;
    } work { this, (size_t) n };
    const auto format_part = [](int32_t i, void * data) {
        const struct work & w = *(const struct work *) data;
        const size_t n_chunks = w.self->chunks.size(), part = (size_t) i;
        w.self->format_chunks(n_chunks * part / w.n, n_chunks * (part + 1) / w.n, w.self->parts[part]);
    };
    if (n > 1) {
        team.run(n, format_part, &work);
    } else {
        format_part(0, &work);
    }
    pending.clear();
    chunks.clear();
    write_parts();
}

// the entries of the chunks from `first` to before `last`
void log_file::format_chunks(size_t first, size_t last, log_lines & lines) {
    const auto entry_at = [this](size_t chunk) {
        return pending.data() + (chunk < chunks.size() ? chunks[chunk] : pending.size());
    };
    const char * at = entry_at(first);
    const char * const end = entry_at(last);
    while (at < end) {
        entry head;
        memcpy(&head, at, sizeof(head));
        head.format(at + sizeof(head), head.size, lines);
        at += sizeof(head) + aligned(head.size);
    }
}

// all of them at once, in large pieces
void log_file::write_parts() {
    size_t size = 0;
    pieces.clear();
    for (const auto & part : parts) {
        const std::string_view text = part.line.lines();
        pieces.push_back({ const_cast<char *>(text.data()), text.size() });
        size += text.size();
    }
    if (size == 0) {
        return;
    }
    size_t kept = error == 0 ? write_some(pieces.data(), pieces.size()) : 0;
    if (kept < size) {
        kept = give_up(kept);
        fail(error);
    }
    offset += kept;
    bytes  += kept;
    for (auto & part : parts) {
        part.line.clear();
    }
}

// returns the bytes written; when fewer than asked for, `error` says why
size_t log_file::write_some(iovec * piece, size_t n_pieces) {
    sigpipe_guard guard(!is_regular());
    const iovec * const end = piece + n_pieces;
    size_t written = 0;
    while (piece < end) {
        const auto n = ::writev(file.get(), piece, (int) (end - piece));
        if (n < 0 && errno != EINTR) {
            error = errno;
            break;
        }
        size_t done = n > 0 ? (size_t) n : 0;
        written += done;
        while (piece < end && done >= piece->iov_len) {
            done -= piece++->iov_len;
        }
        if (done > 0) {
            piece->iov_base = (char *) piece->iov_base + done;
            piece->iov_len -= done;
        }
    }
    return written;
}

// The disk is full, or the reader went away: cuts the file back to whole lines and drops the rest. Returns how
// many of the bytes that were written stay.
size_t log_file::give_up(size_t written) {
    size_t left = !is_regular() ? written : written > last_line_room ? written - last_line_room : 0;
    size_t kept = 0;
    for (auto & part : parts) {
        const std::string_view text = part.line.lines();
        const std::string_view head = text.substr(0, left);
        const size_t lines = head.rfind('\n') + 1;  // npos + 1 is 0
        drop_lines(part, text.data() + lines, text.size() - lines);
        kept += lines;
        left -= head.size();
    }
    if (is_regular() && kept < written) {
        (void) !ftruncate(file.get(), (off_t) (offset + kept));
    }
    return kept;
}

void log_file::fail(int reason) {
    if (on_failure) {
        std::exchange(on_failure, nullptr)(reason);
    }
}

void log_file::drop_lines(log_lines & lines, const char * data, size_t size) {
    static const char prefix[] = "{\"event\":\"";
    const char * const end = data + size;
    while (data < end) {
        const char * newline = (const char *) memchr(data, '\n', (size_t) (end - data));
        const char * name    = data + sizeof(prefix) - 1;
        const char * quote   = (const char *) memchr(name, '"', (size_t) (newline - name));
        lines.count_of(name, (size_t) (quote - name)).lines--;
        n_dropped++;
        data = newline + 1;
    }
}

std::vector<log_lines::event_count> log_file::count_events() {
    log_lines all;
    for (const auto & part : parts) {
        for (const auto & count : part.counts) {
            all.count_of(count.event).lines += count.lines;
        }
    }
    return all.counts;
}

int log_file::close_locked(const std::string & last_line) {
    const int  first_error = error;
    const bool reader_gone = first_error != 0 && !is_regular();
    if (!reader_gone) {
        error = 0;
        iovec piece = { const_cast<char *>(last_line.data()), last_line.size() };
        const size_t written = write_some(&piece, 1);
        if (written != last_line.size() && is_regular()) {
            // a session_end that is cut off would look like a kill; without one it is merely unclosed
            (void) !ftruncate(file.get(), (off_t) offset);
        }
    }
    const int status = file.close();
    if (error == 0) {
        error = status != 0 ? -status : first_error;
    }
    if (error != 0) {
        fail(error);
    }
    return -error;
}

// literals are mostly one and the same, so that their addresses tell them apart
log_lines::event_count & log_lines::count_of(const char * event) {
    for (auto & count : counts) {
        if (count.event == event) {
            return count;
        }
    }
    return count_of(event, strlen(event));
}

log_lines::event_count & log_lines::count_of(const char * event, size_t length) {
    for (auto & count : counts) {
        if (strncmp(count.event, event, length) == 0 && count.event[length] == '\0') {
            return count;
        }
    }
    counts.push_back({ event, 0 });
    return counts.back();
}

}  // namespace llama_instr
