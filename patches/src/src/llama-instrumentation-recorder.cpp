// llama-instrumentation-recorder.cpp - opens and closes sessions, also where the environment asks for one; fork and exit

#include "llama-instrumentation-recorder.h"

#include "llama-instrumentation.h"
#include "llama-instrumentation-environment.h"
#include "llama-instrumentation-host.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
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
    // every session that may still be referred to: the open one is the last; before it come the parts that it
    // followed and sessions that are being closed
    std::vector<std::weak_ptr<session>> sessions;
    std::mutex marks;
    bool recorder_runs = false;
    std::atomic<bool> recorder_busy { false };  // it holds sessions
    std::mutex telling;
    held_file  standard_error;  // as it was before a library redirected it, as llama-cpp-python does

    // the hooks' flag; with the mutex held
    void update_flag() { llama_instr_on = open != nullptr || environment_asks || closing > 0; }
};

global_state & global() {
    static global_state * state = new global_state;
    return *state;
}

thread_local char last_error[1024];  // an array, which outlives the thread-locals with destructors

int fail(int code, const std::string & text) {
    snprintf(last_error, sizeof(last_error), "%s", text.c_str());
    return -code;
}

// the sessions that somebody holds; with the mutex held
std::vector<std::shared_ptr<session>> held_sessions() {
    std::vector<std::shared_ptr<session>> held;
    for (const auto & weak : global().sessions) {
        if (auto s = weak.lock()) {
            held.push_back(std::move(s));
        }
    }
    return held;
}

// The recorder's thread: ten times a second, it looks at the machine, and formats and writes what the threads that decode
// have recorded.
void * run_recorder(void *) {
    auto & g = global();
    is_recorder_thread();
    for (;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        std::vector<std::shared_ptr<session>> held;
        {
            std::lock_guard<std::mutex> lock(g.mutex);
            held = held_sessions();
            g.recorder_runs = g.recorder_busy = !held.empty();
        }
        if (held.empty()) {
            return nullptr;
        }
        for (const auto & s : held) {
            s->record_machine();
            s->log.flush();
            s->faults_due = true;
        }
        held.clear();  // the last one to hold a part closes it
        g.recorder_busy = false;
    }
}

// The thread blocks all signals. Call with the mutex held.
void start_recorder() {
    auto & g = global();
    if (g.recorder_runs) {
        return;
    }
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    pthread_t thread;
    if (pthread_create(&thread, nullptr, run_recorder, nullptr) == 0) {
        pthread_detach(thread);
        g.recorder_runs = true;
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

// call with the mutex held
void make_current(const std::shared_ptr<session> & s) {
    auto & g = global();
    const auto gone = [](const std::weak_ptr<session> & weak) { return weak.expired(); };
    g.sessions.erase(std::remove_if(g.sessions.begin(), g.sessions.end(), gone), g.sessions.end());
    g.sessions.push_back(s);
    g.open = s;
    g.update_flag();
}

std::string reason_of(int status) {
    return status == -EBADMSG ? "exists and is not a log, so it is not overwritten" : strerror(-status);
}

int open_session(const request & asked) {
    if (global().open) {
        return fail(EBUSY, "a session is open already; a process records one at a time");
    }
    auto s = std::make_shared<session>();
    if (!parse_level(asked.level.c_str(), s->detail)) {
        return fail(EINVAL, "unknown level '" + asked.level + "'; it is minimal, detailed or verbose");
    }
    s->all           = std::make_shared<recording>();
    s->all->id       = random_id();
    s->all->path     = asked.path;
    s->all->args     = asked.args;
    s->flags         = asked.flags;
    s->stats_pattern = asked.stats;
    try {
        s->stats = std::regex(asked.stats);
    } catch (const std::regex_error & err) {
        return fail(EINVAL, "not a regular expression: '" + asked.stats + "': " + err.what());
    }
    const int status = s->start(asked.path, asked.found);
    if (status != 0) {
        return fail(-status, asked.path + ": " + reason_of(status));
    }
    s->all->rotate_bytes = s->log.is_regular() ? asked.rotate_bytes : 0;
    make_current(s);
    start_recorder();
    return 0;
}

void open_from_environment() {
    auto & g = global();
    g.environment_asks = false;
    g.update_flag();

    request asked = request_of_environment();
    int status = open_session(asked);
    if (status == 0 && asked.removes_parts) {
        remove_parts(asked.path);
    }
    if (status == -EEXIST) {
        const std::string other = before_suffix(asked.path, std::to_string(getpid()));
        tell(asked.path + " exists; recording to " + other);
        asked.path  = other;
        asked.found = {};
        status = open_session(asked);
    }
    if (status != 0) {
        tell(std::string("nothing is recorded: ") + last_error);
        if (asked.flags & LLAMA_INSTR_STOP_ON_ERROR) {
            _exit(74);  // EX_IOERR of sysexits.h
        }
    }
}

int close_session(const char * reason, bool wait) {
    auto & g = global();
    std::vector<std::shared_ptr<session>> parts;  // the last one is the open session
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        if (!g.open) {
            return fail(ENOENT, "no session is open");
        }
        parts  = held_sessions();
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
        const int of_part = part->close(part == parts.back() ? reason : "rotated");
        status = status == 0 ? of_part : status;
    }
    while (g.recorder_busy) {  // it may be closing a part
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return status == 0 ? 0 : fail(-status, std::string("the log is not complete: ") + strerror(-status));
}

void keep_standard_error() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.telling);
    g.standard_error.duplicate(STDERR_FILENO);
}

void at_exit() {
    if (llama_instr_enabled()) {
        fflush(stdout);  // closing may end the program at once
        close_session("exit", false);
    }
}

// Locked while the process forks, so that the child can unlock them and finds what they guard whole. No thread holds
// one of them while it writes to a log, except for the first lines of a new one, or waits for a step.
std::array<std::mutex *, 4> locks_of_process() {
    auto & g = global();
    return { &g.marks, &g.mutex, &facts_mutex(), &g.telling };  // in the order in which threads lock them
}

void before_fork() {
    for (std::mutex * mutex : locks_of_process()) {
        mutex->lock();
    }
}

void after_fork() {
    for (std::mutex * mutex : locks_of_process()) {
        mutex->unlock();
    }
}

// The child of a fork inherits its parent's file and must not write to it. It opens its own log if the environment
// asks for one.
void in_child() {
    auto & g = global();
    for (auto & part : held_sessions()) {
        part->log.abandon();
        new std::shared_ptr<session>(std::move(part));  // never destroyed: its locks may be held forever
    }
    g.sessions.clear();
    g.open          = nullptr;
    g.recorder_runs = g.recorder_busy = false;  // the child has only the thread that forked
    g.closing = 0;
    g.environment_asks = !request_of_environment().path.empty();
    g.update_flag();
    after_fork();
}

// runs when the library is loaded
struct startup {
    startup() noexcept {
        auto & g = global();
        pthread_atfork(before_fork, after_fork, in_child);
        atexit(at_exit);
        // after a KeyboardInterrupt Python cleans up and ends itself by SIGINT; exit() never runs then
        if (const auto py_at_exit = (int (*)(void (*)())) dlsym(RTLD_DEFAULT, "Py_AtExit")) {
            py_at_exit(at_exit);
        }
        g.environment_asks = !request_of_environment().path.empty();
        g.update_flag();
        if (g.environment_asks) {
            keep_standard_error();
        }
    }
} startup_instance;

}  // namespace

std::shared_ptr<session> current_session() {
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
    const int status = next->start(path, {});
    if (status != 0) {
        all.rotate_bytes = 0;
        tell(path + ": " + reason_of(status) + "; recording continues in " + full->log.path());
        return full;
    }
    for (const auto & mark : all.marks) {
        full->write_mark(mark.first, mark.second, "end");
        next->write_mark(mark.first, mark.second, "begin");
    }
    next->known.follow(full->known);
    make_current(next);
    return next;
}

// Writes what it did first: a worker process may call _exit() once it has freed its models. A rotation, which copies
// what the last part knows, takes the same lock.
template <typename T> static void forget_in_all(const T * what) {
    auto & g = global();
    std::vector<std::shared_ptr<session>> held;
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        held = held_sessions();
    }
    for (const auto & s : held) {
        s->log.flush();
    }
    std::lock_guard<std::mutex> lock(g.mutex);
    held = held_sessions();
    for (const auto & s : held) {
        s->known.forget(what);
    }
}

void forget_everywhere(const llama_context * ctx) {
    forget_in_all(ctx);
}

void forget_everywhere(const llama_model * model) {
    forget_in_all(model);
}

void tell(const std::string & text) {
    auto & g = global();
    const std::string line = "llama-instr: " + text + "\n";
    std::lock_guard<std::mutex> lock(g.telling);
    const int kept = g.standard_error.get();
    (void) !::write(kept >= 0 ? kept : STDERR_FILENO, line.data(), line.size());
}

}  // namespace llama_instr

using namespace llama_instr;

const char * llama_instr_error(void) {
    return last_error;
}

int32_t llama_instr_begin(const char * path, const char * level, const char * args, const char * stats, int32_t flags) {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    // the program's call goes before the environment
    const bool environment_asks = g.environment_asks;
    g.environment_asks = false;
    request asked;
    asked.path  = path ? path : "";
    asked.level = level ? level : "detailed";
    asked.args  = args ? args : "";
    asked.stats = stats ? stats : "";
    asked.flags = flags;
    asked.found.replace = (flags & LLAMA_INSTR_OVERWRITE) != 0;
    const int status = open_session(asked);
    if (status == 0) {
        keep_standard_error();
    } else {
        g.environment_asks = environment_asks;
    }
    return status;
}

int32_t llama_instr_end(void) {
    return close_session("closed", true);
}
