// llama-instrumentation-session.cpp - opens and closes the session, also where the environment asks for it

#include "llama-instrumentation-session.h"

#include "llama-instrumentation.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <pthread.h>
#include <thread>
#include <unistd.h>

std::atomic<bool> llama_instr_on { false };

namespace llama_instr {

namespace {

// Never destroyed: threads of the application may still decode while the process ends.
struct global_state {
    std::mutex mutex;
    std::shared_ptr<session> open;
    bool environment_asks = false;
    int  closing = 0;  // sessions that wait for the steps under way, whose hooks must go on
    std::vector<std::weak_ptr<session>> full;  // parts that were followed by another, until they are closed
    std::mutex marks;
    bool idle_thread = false;  // there is one

    // the hooks' flag; with the mutex held
    void update_flag() { llama_instr_on = open != nullptr || environment_asks || closing > 0; }
};

global_state & global() {
    static global_state * state = new global_state;
    return *state;
}

thread_local char last_error[1024];  // not a string: it outlives the thread-locals that have to be destroyed

int fail(int code, const std::string & text) {
    snprintf(last_error, sizeof(last_error), "%s", text.c_str());
    return -code;
}

const char * level_names[] = { "minimal", "detailed", "verbose" };

std::string environment(const char * name) {
    const char * value = getenv(name);
    return value ? value : "";
}

std::string replace_pid(std::string path) {
    for (size_t at; (at = path.find("%p")) != std::string::npos;) {
        path.replace(at, 2, std::to_string(getpid()));
    }
    return path;
}

// session.log, 1234 -> session.1234.log
std::string before_suffix(const std::string & path, const std::string & text) {
    const size_t slash = path.find_last_of('/');
    const size_t dot   = path.find_last_of('.');
    const bool   has_suffix = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1);
    const size_t at = has_suffix ? dot : path.size();
    return path.substr(0, at) + "." + text + path.substr(at);
}

// A program that waits for its next request may wait for hours, or be killed: what is left in memory when it
// stops decoding is written by a thread that has nothing else to do. It takes none of the program's signals.
void start_idle_thread() {
    auto & g = global();
    if (g.idle_thread) {
        return;
    }
    const auto run = [](void *) -> void * {
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            std::shared_ptr<session> s;
            {
                auto & g = global();
                std::lock_guard<std::mutex> lock(g.mutex);
                s = g.open;
                g.idle_thread = s != nullptr;
            }
            if (!s) {
                return nullptr;
            }
            s->log.flush_if_idle();
        }
    };
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    pthread_t thread;
    if (pthread_create(&thread, nullptr, run, nullptr) == 0) {
        pthread_detach(thread);
        g.idle_thread = true;
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

// creates the file; returns 0 or -errno
int start_log(session & s, const std::string & path) {
    const int status = s.log.open(path.c_str(), (s.flags & LLAMA_INSTR_OVERWRITE) != 0);
    if (status == 0) {
        write_session_start(s);
        s.log.flush();
    }
    return status;
}

int open_session(const std::string & path, const std::string & level_name, const std::string & args, const std::string & stats, int32_t flags, uint64_t rotate_bytes) {
    auto & g = global();
    if (g.open) {
        return fail(EBUSY, "a session is open already; a process records one at a time");
    }
    auto s = std::make_shared<session>();
    if (!parse_level(level_name.c_str(), s->detail)) {
        return fail(EINVAL, "unknown level '" + level_name + "'; it is minimal, detailed or verbose");
    }
    s->all               = std::make_shared<recording>();
    s->all->id           = random_id();
    s->all->path         = path;
    s->all->args         = args;
    s->flags         = flags;
    s->stats_pattern = stats;
    try {
        s->stats = std::regex(stats);
    } catch (const std::regex_error & err) {
        return fail(EINVAL, "not a regular expression: '" + stats + "': " + err.what());
    }
    const int status = start_log(*s, path);
    if (status != 0) {
        return fail(-status, path + ": " + strerror(-status));
    }
    s->all->rotate_bytes = s->log.is_regular() ? rotate_bytes : 0;
    g.open = std::move(s);
    g.update_flag();
    start_idle_thread();
    return 0;
}

void open_from_environment() {
    auto & g = global();
    g.environment_asks = false;
    g.update_flag();

    std::string path = replace_pid(environment("LLAMA_INSTR_LOG"));
    std::string level_name = environment("LLAMA_INSTR_LEVEL");
    if (level_name.empty()) {
        level_name = "detailed";
    }
    const bool stop = environment("LLAMA_INSTR_ON_ERROR") == "stop";
    const int32_t flags = stop ? LLAMA_INSTR_STOP_ON_ERROR : 0;
    const auto open_at = [&](const std::string & at) {
        return open_session(at, level_name, environment("LLAMA_INSTR_ARGS"), environment("LLAMA_INSTR_STATS"), flags,
                            strtoull(environment("LLAMA_INSTR_ROTATE").c_str(), nullptr, 10));
    };
    int status = open_at(path);
    if (status == -EEXIST) {
        const std::string other = before_suffix(path, std::to_string(getpid()));
        fprintf(stderr, "llama-instr: %s exists; recording to %s\n", path.c_str(), other.c_str());
        status = open_at(other);
    }
    if (status != 0) {
        fprintf(stderr, "llama-instr: nothing is recorded: %s\n", last_error);
        if (stop) {
            _exit(74);  // EX_IOERR of sysexits.h
        }
    }
}

// those that steps still write to; with the mutex held
std::vector<std::shared_ptr<session>> full_parts() {
    std::vector<std::shared_ptr<session>> parts;
    for (const auto & weak : global().full) {
        if (auto part = weak.lock()) {
            parts.push_back(std::move(part));
        }
    }
    return parts;
}

int close_session(const char * reason, bool wait) {
    auto & g = global();
    std::vector<std::shared_ptr<session>> parts;  // the last one is still to be followed
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        if (!g.open) {
            return fail(ENOENT, "no session is open");
        }
        parts = full_parts();
        parts.push_back(std::move(g.open));
        g.open = nullptr;
        g.closing++;
    }
    if (wait) {
        for (const auto & part : parts) {
            part->wait_for_steps();
        }
    }
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        g.closing--;
        g.update_flag();
    }
    int status = 0;
    for (const auto & part : parts) {
        if (wait) {
            part->log.flush(team_of_thread());
        }
        const int of_part = part->close(part == parts.back() ? reason : "rotated");
        status = status == 0 ? of_part : status;
    }
    return status == 0 ? 0 : fail(-status, std::string("the log is not complete: ") + strerror(-status));
}

void at_exit() {
    if (llama_instr_enabled()) {
        close_session("exit", false);
    }
}

// The child of a fork has its parent's file: it must not write there. It opens a log of its own when the
// environment asks for one.
void in_child() {
    auto & g = global();
    new (&g.mutex) std::mutex;  // another thread of the parent may have held them
    new (&g.marks) std::mutex;
    forget_facts_lock();
    team_of_thread() = {};  // its threads do not exist here
    auto inherited = full_parts();
    inherited.push_back(std::move(g.open));
    for (auto & part : inherited) {
        if (part) {
            part->log.abandon();
            new std::shared_ptr<session>(std::move(part));  // never destroyed: its locks may be held for ever
        }
    }
    g.open        = nullptr;
    g.idle_thread = false;  // a fork has but the thread that made it
    g.closing = 0;
    g.environment_asks = !environment("LLAMA_INSTR_LOG").empty();
    g.update_flag();
}

// runs when the library is loaded
struct startup {
    startup() noexcept {
        auto & g = global();
        pthread_atfork(nullptr, nullptr, in_child);
        atexit(at_exit);
        g.environment_asks = !environment("LLAMA_INSTR_LOG").empty();
        g.update_flag();
    }
} startup_instance;

}  // namespace

bool parse_level(const char * text, level & out) {
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, level_names[i]) == 0) {
            out = (level) i;
            return true;
        }
    }
    return false;
}

[[gnu::hot]] std::shared_ptr<session> current_session() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    if (!g.open && g.environment_asks) {
        open_from_environment();
    }
    return g.open;
}

std::shared_ptr<session> open_session_or_null() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    return g.open;
}

std::unique_lock<std::mutex> marks_lock() {
    return std::unique_lock<std::mutex>(global().marks);
}

std::shared_ptr<session> next_part(std::shared_ptr<session> full) {
    auto & g = global();
    const auto marks = marks_lock();
    std::lock_guard<std::mutex> lock(g.mutex);
    if (g.open != full) {
        return g.open;  // another thread was faster
    }
    auto & all = *full->all;
    auto next = std::make_shared<session>();
    next->all           = full->all;
    next->part          = full->part + 1;
    next->detail        = full->detail;
    next->flags         = full->flags;
    next->stats_pattern = full->stats_pattern;
    next->stats         = full->stats;
    const std::string path = before_suffix(all.path, "part" + std::to_string(next->part));
    const int status = start_log(*next, path);
    if (status != 0) {
        all.rotate_bytes = 0;
        fprintf(stderr, "llama-instr: %s: %s; %s goes on\n", path.c_str(), strerror(-status), full->log.path().c_str());
        return full;
    }
    for (const auto & mark : all.marks) {
        write_mark(*full, mark.first, mark.second.name.c_str(), "end", mark.second.thread);
        write_mark(*next, mark.first, mark.second.name.c_str(), "begin", mark.second.thread);
    }
    next->follow(*full);
    g.full.erase(std::remove_if(g.full.begin(), g.full.end(), [](const auto & part) { return part.expired(); }), g.full.end());
    g.full.push_back(full);
    g.open = next;
    return next;
}

int session::close(const char * reason) {
    return log.close([&](const log_file::totals & totals) {
        json_line line;
        line.begin(LLAMA_INSTR_EV_SESSION_END, ggml_instr_clock_ns());
        line.kv(LLAMA_INSTR_K_REASON, reason);
        line.object(LLAMA_INSTR_K_EVENTS);
        for (const auto & count : totals.events) {
            if (count.lines > 0) {
                line.kv_dynamic(count.event, count.lines);
            }
        }
        line.close_object();
        line.kv(LLAMA_INSTR_K_BYTES, totals.bytes);
        line.kv(LLAMA_INSTR_K_DROPPED, totals.dropped);
        line.kv(LLAMA_INSTR_K_DROPPED_OPS, dropped_ops.load());
        line.kv(LLAMA_INSTR_K_DECODE_NS, totals.scale.duration(decode_ticks));
        line.kv(LLAMA_INSTR_K_OVERHEAD_NS, totals.scale.duration(overhead_ticks));
        return std::string(line.end());
    });
}

void session::wait_for_steps() {
    // asked again and again, so that a step need not tell; one that hangs must not hang the end of the session
    const uint64_t until = ggml_instr_clock_ns() + (uint64_t) 10 * 1000 * 1000 * 1000;
    while (steps > 0 && ggml_instr_clock_ns() < until) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

void session::tell_failure() {
    if (told_failure.exchange(true)) {
        return;
    }
    const int  error = log.failed();
    const bool stop = (flags & LLAMA_INSTR_STOP_ON_ERROR) != 0;
    fprintf(stderr, "llama-instr: %s cannot be written (%s): %s\n", log.path().c_str(), strerror(error),
            stop ? "stopping, as asked" : "inference goes on, events are dropped and counted");
    if (stop) {
        log.close([](const log_file::totals &) { return std::string(); });
        _exit(74);
    }
}

}  // namespace llama_instr

using namespace llama_instr;

const char * llama_instr_error(void) {
    return last_error;
}

int32_t llama_instr_begin(const char * path, const char * level, const char * args, const char * stats, int32_t flags) {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    // the program's own word goes before the environment's
    const bool asked = g.environment_asks;
    g.environment_asks = false;
    const int status = open_session(path ? path : "", level ? level : "detailed", args ? args : "", stats ? stats : "", flags, 0);
    if (status != 0) {
        g.environment_asks = asked;
    }
    return status;
}

int32_t llama_instr_end(void) {
    return close_session("closed", true);
}
