// llama-instrumentation-log.cpp - see the header for the invariant that it keeps

#include "llama-instrumentation-log.h"

#include "llama-instrumentation-schema.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <unistd.h>
#include <utility>

namespace llama_instr {

namespace {

// A reader that has gone must not end the program: this thread blocks SIGPIPE while it writes to something that is
// not a file, and takes back a signal that its write has caused.
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
    std::lock_guard<std::mutex> lock(writing);
    const int status = file.create(path, found);
    if (status != 0) {
        file.close();
        return status;
    }
    name = path;
    lines.clock = &clock;
    clock.add(moment::now());
    take(true);
    return 0;
}

int log_file::begin() {
    std::lock_guard<std::mutex> lock(writing);
    take(true);
    write_taken();
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
        n_dropped++;
        return;
    }
    add(whole_line { event }, line);
}

void log_file::add_entry(format_fn format, std::string_view record, std::string_view tail, const std::shared_ptr<const void> & owned) {
    {
        std::lock_guard<std::mutex> lock(adding);
        if (!accepts) {
            return;
        }
        const entry head = { format, record.size() + tail.size() };
        added.entries.append((const char *) &head, sizeof(head)).append(record).append(tail);
        added.entries.resize(aligned(added.entries.size()));
        if (owned && (added.owned.empty() || added.owned.back() != owned)) {
            added.owned.push_back(owned);
        }
        if (added.entries.size() < most_bytes) {
            return;
        }
    }
    flush();
}

void log_file::flush() {
    std::lock_guard<std::mutex> lock(writing);
    if (!file.is_open()) {
        return;
    }
    take(true);
    if (!taken.entries.empty()) {
        write_taken();
    }
}

void log_file::abandon() {
    // the parent's other threads do not exist here and may have held the locks: do not take them
    accepts = false;
    file.close();
}

void log_file::take(bool accepts_more) {
    std::lock_guard<std::mutex> lock(adding);
    std::swap(added, taken);
    accepts = accepts_more;
}

void log_file::write_taken() {
    // read after the records were taken, so that none of them is later
    const moment now = moment::now();
    clock.add(now);
    for (size_t at = 0; at < taken.entries.size();) {
        entry head;
        memcpy(&head, &taken.entries[at], sizeof(head));
        head.format(&taken.entries[at + sizeof(head)], head.size, lines);
        at += sizeof(head) + aligned(head.size);
        if (lines.line.lines().size() >= write_bytes) {
            write_lines();
        }
    }
    write_lines();
    taken.entries.clear();
    taken.owned.clear();
    spent += ticks_now() - now.ticks;
}

void log_file::write_lines() {
    const std::string_view text = lines.line.lines();
    const size_t written = error == 0 ? write_some(text) : 0;
    if (written < text.size()) {
        bytes += give_up(text, written);
        fail(error);
    } else {
        bytes += written;
    }
    lines.line.clear();
}

// returns the bytes written; if not all were, `error` says why
size_t log_file::write_some(std::string_view text) {
    sigpipe_guard guard(!is_regular());
    size_t written = 0;
    while (written < text.size()) {
        const auto n = ::write(file.get(), text.data() + written, text.size() - written);
        if (n < 0 && errno != EINTR) {
            error = errno;
            break;
        }
        written += n > 0 ? (size_t) n : 0;
    }
    return written;
}

// The disk is full, or the reader has gone: cuts the file back to whole lines and drops the rest. Returns how many
// of the written bytes stay.
size_t log_file::give_up(std::string_view text, size_t written) {
    const size_t left = !is_regular() ? written : written > last_line_room ? written - last_line_room : 0;
    const size_t kept = text.substr(0, left).rfind('\n') + 1;  // npos + 1 is 0
    drop_lines(text.substr(kept));
    if (is_regular() && kept < written) {
        (void) !ftruncate(file.get(), (off_t) (bytes + kept));
    }
    return kept;
}

void log_file::fail(int reason) {
    if (on_failure) {
        std::exchange(on_failure, nullptr)(reason);
    }
}

void log_file::drop_lines(std::string_view text) {
    static const char prefix[] = "{\"event\":\"";
    while (!text.empty()) {
        const std::string_view name = text.substr(sizeof(prefix) - 1);
        if (auto * count = lines.find(name.substr(0, name.find('"')))) {
            count->lines--;
        }
        n_dropped++;
        text.remove_prefix(text.find('\n') + 1);
    }
}

int log_file::close_file(const std::string & last_line) {
    const int  first_error = error;
    const bool reader_gone = first_error != 0 && !is_regular();
    if (!reader_gone) {
        error = 0;
        if (write_some(last_line) != last_line.size() && is_regular()) {
            // a session_end that is cut off would look like a kill; without one the log is only unclosed
            (void) !ftruncate(file.get(), (off_t) bytes);
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

// equal literals mostly have one address, so that compare first
log_lines::event_count & log_lines::count_of(const char * event) {
    for (auto & count : counts) {
        if (count.event == event) {
            return count;
        }
    }
    if (event_count * found = find(event)) {
        return *found;
    }
    counts.push_back({ event, 0 });
    return counts.back();
}

log_lines::event_count * log_lines::find(std::string_view event) {
    for (auto & count : counts) {
        if (event == count.event) {
            return &count;
        }
    }
    return nullptr;
}

}  // namespace llama_instr
