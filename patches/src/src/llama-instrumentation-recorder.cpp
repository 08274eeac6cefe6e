// llama-instrumentation-recorder.cpp - the session of this process, which the environment may ask for: opens and closes it,
// also at fork and exit; the C API

#include "llama-instrumentation-build.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-thread.h"

#include "llama-context.h"
#include "llama-memory.h"

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

//
// the environment
//

std::string environment(const char * name, const char * otherwise = "") {
    const char * value = getenv(name);
    return value && *value ? value : otherwise;
}

std::string replace_pid(std::string path) {
    for (size_t at; (at = path.find("%p")) != std::string::npos;) {
        path.replace(at, 2, std::to_string(getpid()));
    }
    return path;
}

// "DEVICE:INODE" of the log that may be replaced: one process of the command replaces it, and the others then
// find another file there
held_file::existing file_to_replace(const std::string & text) {
    held_file::existing found;
    char * end = nullptr;
    found.dev     = (dev_t) strtoull(text.c_str(), &end, 10);
    found.ino     = *end == ':' ? (ino_t) strtoull(end + 1, nullptr, 10) : 0;
    found.replace = found.ino != 0;
    return found;
}

// the settings from `instr exec`; an empty path if there are none
request request_of_environment() {
    request asked;
    asked.path  = replace_pid(environment("LLAMA_INSTR_LOG"));
    asked.level = environment("LLAMA_INSTR_LEVEL", "detailed");
    asked.args  = environment("LLAMA_INSTR_ARGS");
    asked.stats = environment("LLAMA_INSTR_STATS");
    asked.flags = environment("LLAMA_INSTR_ON_ERROR") == "stop" ? LLAMA_INSTR_STOP_ON_ERROR : 0;
    asked.found = file_to_replace(environment("LLAMA_INSTR_OVERWRITE"));
    asked.rotate_bytes  = strtoull(environment("LLAMA_INSTR_ROTATE").c_str(), nullptr, 10);
    asked.removes_parts = asked.rotate_bytes > 0 && !environment("LLAMA_INSTR_OVERWRITE").empty();
    return asked;
}

//
// sessions
//

// Never destroyed: threads of the application may still decode while the process ends.
struct global_state {
    std::mutex mutex;
    std::mutex pointing;  // guards `open` for those who must not wait until a session is opened
    std::shared_ptr<log_part> open;
    bool environment_asks = false;
    int  closing = 0;  // sessions that wait for what is under way, whose hooks must go on
    // every part that may still be referred to: the open one is the last; before it come those that it followed and
    // those of sessions that are being closed
    std::vector<std::weak_ptr<log_part>> parts;
    std::mutex marks;  // held while a mark is written, so that a rotation cuts every open span in two

    // with the mutex held
    void set_open(std::shared_ptr<log_part> s) {
        std::lock_guard<std::mutex> lock(pointing);
        open.swap(s);
    }

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

// the parts that are still held; with the mutex held
std::vector<std::shared_ptr<log_part>> held_parts() {
    std::vector<std::shared_ptr<log_part>> held;
    for (const auto & weak : global().parts) {
        if (auto s = weak.lock()) {
            held.push_back(std::move(s));
        }
    }
    return held;
}

// call with the mutex held
void make_current(const std::shared_ptr<log_part> & s) {
    auto & g = global();
    const auto gone = [](const std::weak_ptr<log_part> & weak) { return weak.expired(); };
    g.parts.erase(std::remove_if(g.parts.begin(), g.parts.end(), gone), g.parts.end());
    g.parts.push_back(s);
    g.set_open(s);
    g.update_flag();
}

int open_session(const request & asked) {
    if (global().open) {
        return fail(EBUSY, "this process is already being recorded, to " + global().open->log.path() +
                           "; close that session first, or leave out `instr exec`");
    }
    auto s = std::make_shared<log_part>();
    const auto * const name = std::find(std::begin(level_names), std::end(level_names), asked.level);
    if (name == std::end(level_names)) {
        return fail(EINVAL, "unknown level '" + asked.level + "'; it is minimal, detailed or verbose");
    }
    s->detail     = (level) (name - level_names);
    s->all        = std::make_shared<session>();
    s->all->id    = random_id();
    s->all->asked = asked;
    try {
        s->all->stats = std::regex(asked.stats);
    } catch (const std::regex_error & err) {
        return fail(EINVAL, "not a regular expression: '" + asked.stats + "': " + err.what());
    }
    s->write_start();
    const int status = s->all->files.open(s, asked.path, asked.found);
    if (status != 0) {
        return fail(-status, asked.path + ": " + reason_of(status));
    }
    s->all->rotate_bytes = s->log.is_regular() ? asked.rotate_bytes : 0;
    make_current(s);
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

// polls, so that steps and descriptions need not notify; one that hangs must not hang the end of the session
void wait_for_uses(const std::vector<std::shared_ptr<log_part>> & parts) {
    const auto     is_used = [](const std::shared_ptr<log_part> & part) { return part->n_under_way() > 0; };
    const uint64_t until   = ggml_instr_clock_ns() + (uint64_t) 10 * 1000 * 1000 * 1000;
    while (std::any_of(parts.begin(), parts.end(), is_used) && ggml_instr_clock_ns() < until) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

int close_session(const char * reason, bool wait) {
    auto & g = global();
    std::shared_ptr<log_part> last;
    std::vector<std::shared_ptr<log_part>> parts;
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        if (!g.open) {
            return fail(ENOENT, "no session is open");
        }
        last  = g.open;
        parts = held_parts();
        g.set_open(nullptr);
        g.closing++;
    }
    if (wait) {
        wait_for_uses(parts);
    }
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        g.closing--;
        g.update_flag();
    }
    const int status = last->all->files.close(reason);
    if (status == 0) {
        return 0;
    }
    last->log.fail(-status);
    uint64_t unwritten = 0;
    for (const auto & part : parts) {
        unwritten += part->all == last->all ? part->log.unwritten() : 0;
    }
    return fail(-status, last->log.path() + ": the log is not complete: " + reason_of(status) + "; " +
                         std::to_string(unwritten) + " events are missing");
}

// call with the mutex held
const std::shared_ptr<log_part> & current_locked() {
    auto & g = global();
    if (!g.open && g.environment_asks) {
        open_from_environment();
    }
    return g.open;
}

// once there is one; asks for it otherwise
void follow_with_next_part() {
    auto & g = global();
    std::lock_guard<std::mutex> marks(g.marks);
    std::lock_guard<std::mutex> lock(g.mutex);
    const auto full = g.open;
    const auto next = full && full->is_full() ? full->all->files.next() : nullptr;
    if (!next) {
        return;
    }
    for (const auto & mark : full->all->marks) {
        full->write_mark(mark.first, mark.second, "end");
        next->write_mark(mark.first, mark.second, "begin");
    }
    next->known.follow(full->known);
    make_current(next);
}

//
// exit and fork
//

void at_exit() {
    if (llama_instr_enabled()) {
        fflush(stdout);  // closing may end the program at once
        if (close_session("exit", false) == -ETIMEDOUT) {
            tell(last_error);
        }
    }
}

// Locked while the process forks, so that the child can unlock them and finds what they guard whole. No thread holds
// one of them while it waits for the writer, except for a log to be opened, or for a step.
std::array<std::mutex *, 5> locks_of_process() {
    auto & g = global();
    return { &g.marks, &g.mutex, &facts_mutex(), &messages_mutex(), &g.pointing };  // in the order in which threads lock them
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
    for (auto & part : held_parts()) {
        part->log.abandon();
        new std::shared_ptr<log_part>(std::move(part));  // never destroyed: its locks may be held forever
    }
    g.parts.clear();
    g.open    = nullptr;
    g.closing = 0;
    g.environment_asks = !request_of_environment().path.empty();
    g.update_flag();
    after_fork();
}

// runs when the library is loaded
struct startup {
    startup() noexcept {
        auto & g = global();
        ggml_instr_set_rpc_recorder(&rpc_recorder);
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

// the pipe through which a signal reaches the thread that waits for it
int signals[2];

void on_signal(int number) {
    const auto byte = (unsigned char) number;
    (void) !write(signals[1], &byte, 1);
}

void wait_for_signal() {
    unsigned char number;
    while (read(signals[0], &number, 1) != 1) {
    }
    close_session("exit", true);
    signal(number, SIG_DFL);
    kill(getpid(), number);
}

}  // namespace

void close_at_signals() {
    if (request_of_environment().path.empty() || !current_part() || pipe(signals) != 0) {
        return;
    }
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);  // the thread inherits it
    std::thread(wait_for_signal).detach();
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    for (const int number : { SIGINT, SIGTERM, SIGHUP, SIGPIPE }) {
        struct sigaction found = {};
        sigaction(number, nullptr, &found);
        if (found.sa_handler == SIG_DFL) {  // the program does not end itself
            found.sa_handler = on_signal;
            found.sa_flags   = SA_RESTART;
            sigaction(number, &found, nullptr);
        }
    }
}

void tell_reason(const std::string & text) {
    fail(EPIPE, text);
    if (!request_of_environment().path.empty()) {
        tell(text);
    }
}

std::shared_ptr<log_part> current_part() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    return current_locked();
}

std::shared_ptr<log_part> part_of_step() {
    auto & g = global();
    std::unique_lock<std::mutex> lock(g.mutex);
    if (const auto s = current_locked(); s && s->is_full()) {
        lock.unlock();
        follow_with_next_part();
        lock.lock();
    }
    if (g.open) {
        g.open->step_begins();  // with the mutex held: closing the session waits for it
    }
    return g.open;
}

std::shared_ptr<log_part> part_of_description() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.mutex);
    const auto s = current_locked();
    if (!s) {
        return nullptr;
    }
    s->description_begins();  // with the mutex held: closing the session waits for it
    return { s.get(), [s](log_part *) { s->description_ends(); } };
}

std::shared_ptr<log_part> open_part_or_null() {
    auto & g = global();
    std::lock_guard<std::mutex> lock(g.pointing);
    return g.open;
}

// Writes what it did first: a worker process may call _exit() once it has freed its models. A rotation, which copies
// what the last part knows, takes the same lock.
void forget_everywhere(const void * what) {
    forget_facts(what);
    auto & g = global();
    std::vector<std::shared_ptr<log_part>> held;
    {
        std::lock_guard<std::mutex> lock(g.mutex);
        held = held_parts();
    }
    for (const auto & s : held) {
        s->all->files.flush();
    }
    std::lock_guard<std::mutex> lock(g.mutex);
    held = held_parts();
    for (const auto & s : held) {
        s->known.forget(what);
    }
}

}  // namespace llama_instr

//
// the C API
//

using namespace llama_instr;

int32_t llama_instr_abi(void) {
    return LLAMA_INSTR_ABI;
}

const char * llama_instr_info(void) {
    static const std::string info = std::string("{\"llama_cpp\":\"" LLAMA_INSTR_BUILD_LLAMA_CPP "\",\"commit\":\"" LLAMA_INSTR_BUILD_COMMIT
        "\",\"patches\":\"" LLAMA_INSTR_BUILD_PATCHES "\",\"abi\":") + std::to_string(LLAMA_INSTR_ABI) + "}";
    return info.c_str();
}

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
        if (environment_asks) {
            tell("the program records itself, to " + asked.path + "; `instr exec` adds no log");
        }
    } else {
        g.environment_asks = environment_asks;
    }
    return status;
}

int32_t llama_instr_end(void) {
    return close_session("closed", true);
}

int32_t llama_instr_status(void) {
    const auto s = open_part_or_null();
    return s ? LLAMA_INSTR_ACTIVE | (s->log.failed() ? LLAMA_INSTR_FAILED : 0) | (s->all->nan_seen ? LLAMA_INSTR_NAN : 0) : 0;
}

int64_t llama_instr_dropped(void) {
    const auto s = open_part_or_null();
    return s ? (int64_t) s->log.dropped() : 0;
}

int64_t llama_instr_mark(int32_t phase, int64_t id, const char * name, int32_t seq) {
    static const char * phases[] = { "begin", "end", "instant" };
    std::lock_guard<std::mutex> lock(global().marks);
    auto s = llama_instr_enabled() ? current_part() : nullptr;
    if (!s || phase < 0 || phase > 2) {
        return -1;
    }
    auto & all = *s->all;
    const open_mark mark = { name, thread_id(), seq };
    if (phase == 1) {
        all.marks.erase(id);
    } else {
        id = all.next_mark++;
    }
    if (phase == 0) {
        all.marks[id] = mark;
    }
    s->write_mark(id, mark, phases[phase]);
    return id;
}

int32_t llama_instr_note(const char * name, const char * json) {
    auto s = llama_instr_enabled() ? current_part() : nullptr;
    if (!s) {
        return -1;
    }
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_NOTE, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_NAME, name).kv_json(LLAMA_INSTR_K_DATA, json);
    s->write(LLAMA_INSTR_EV_NOTE, line);
    return 0;
}

int32_t llama_instr_memory(const struct llama_context * ctx, char * buf, int32_t size) {
    const std::string json = memory_json(ctx);
    if (buf && size > 0) {
        snprintf(buf, (size_t) size, "%s", json.c_str());
    }
    return (int32_t) json.size();
}

int32_t llama_instr_reserve_graph(struct llama_context * ctx, uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs) {
    const auto s = llama_instr_enabled() ? part_of_description() : nullptr;
    if (!s) {
        return -1;
    }
    llama_memory_context_ptr cells;
    if (llama_memory_t memory = ctx->get_memory()) {
        cells = memory->init_full();
    }
    auto & build = tl().build;
    build.begin();
    ggml_cgraph * gf = ctx->graph_reserve(n_tokens, n_seqs, n_outputs, cells.get(), /*split_only=*/true);
    build.open = false;
    return graph_of(*s, s->known.of(ctx), gf, "reserve", false, &build.layers).id;
}

//
// messages of llama.cpp
//

void llama_instr_message(enum ggml_log_level level, const char * text) {
    if (!llama_instr_enabled() || (level != GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_ERROR)) {
        return;
    }
    // not current_part(): opening a session may print a message
    const auto s = open_part_or_null();
    if (!s) {
        return;
    }
    std::string trimmed = text;
    while (!trimmed.empty() && trimmed.back() == '\n') {
        trimmed.pop_back();
    }
    json_line line;  // not the thread's line: a message may come while that one is built
    line.begin(LLAMA_INSTR_EV_MESSAGE, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_LEVEL, level == GGML_LOG_LEVEL_WARN ? "warn" : "error").kv(LLAMA_INSTR_K_TEXT, trimmed);
    s->write(LLAMA_INSTR_EV_MESSAGE, line);
}
