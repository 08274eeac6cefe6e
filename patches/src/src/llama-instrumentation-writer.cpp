// llama-instrumentation-writer.cpp - see the header for the invariant that it keeps

#include "llama-instrumentation-writer.h"

#include "llama-instrumentation-session.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

namespace llama_instr {

using time_of_day = std::chrono::steady_clock;

// the thread looks at the machine, and writes what the threads that decode have recorded, ten times a second
static constexpr auto interval = std::chrono::milliseconds(100);

// So many intervals a thread waits for this one, and so many while nothing is written. They are counted one by one, so
// that a process that was stopped meanwhile does not give up.
static constexpr int most_intervals = 100;
static constexpr int idle_intervals = 10;

template <typename F> bool writer::wait_until(std::unique_lock<std::mutex> & lock, int patience, F is_done) {
    for (int i = 0, idle = 0; i < most_intervals && idle < patience; i++) {
        const uint64_t before = pieces_written;
        if (done.wait_for(lock, before == stalled_at ? interval * 0 : interval, is_done)) {
            return true;
        }
        idle = before == stalled_at ? patience : pieces_written == before ? idle + 1 : 0;
    }
    stalled_at = pieces_written;
    return false;
}

int writer::open(std::shared_ptr<log_part> first, const std::string & path, const held_file::existing & found) {
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);  // the thread inherits it
    int failure = 0;
    try {
        std::thread([=]() mutable { run(std::move(first), path, found); }).detach();
    } catch (const std::system_error & err) {
        failure = -err.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    if (failure != 0) {
        return failure;
    }
    first.reset();
    std::unique_lock<std::mutex> lock(mutex);
    abandoned = !wait_until(lock, most_intervals, [this] { return opened; });
    return abandoned ? -ETIMEDOUT : status;
}

int writer::close(const char * reason) {
    std::unique_lock<std::mutex> lock(mutex);
    close_reason = reason;
    woken        = true;
    work.notify_one();
    return wait_until(lock, idle_intervals, [this] { return closed; }) ? status : -ETIMEDOUT;
}

void writer::flush() {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t number = ++asked;
    woken = true;
    work.notify_one();
    wait_until(lock, idle_intervals, [this, number] { return flushed >= number || closed; });
}

void writer::wake() {
    std::lock_guard<std::mutex> lock(mutex);
    woken = true;
    work.notify_one();
}

std::shared_ptr<log_part> writer::next() {
    std::lock_guard<std::mutex> lock(mutex);
    if (!part && !wants_part) {
        wants_part = woken = true;
        work.notify_one();
    }
    return std::exchange(part, nullptr);
}

void writer::run(std::shared_ptr<log_part> first, const std::string & path, const held_file::existing & found) {
    const auto all = first->all;  // this writer is a member of it
    is_recorder_thread();
    const int of_opening = first->start(path, found);
    parts open;
    {
        std::lock_guard<std::mutex> lock(mutex);
        opened = true;
        status = of_opening;
        if (status == 0 && !abandoned) {
            open.push_back(std::move(first));
        }
    }
    done.notify_all();
    if (first && of_opening == 0) {
        first->log.discard();
    }
    first.reset();
    auto due = time_of_day::now() + interval;
    while (!open.empty()) {
        {
            std::unique_lock<std::mutex> lock(mutex);
            work.wait_until(lock, due, [this] { return woken; });
            woken = false;
        }
        const bool is_due = time_of_day::now() >= due;
        take_turn(open, is_due);
        due = is_due ? time_of_day::now() + interval : due;
    }
}

void writer::take_turn(parts & open, bool due) {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t number = asked;
    const char *   reason = close_reason;
    const bool     wanted = wants_part;
    lock.unlock();
    if (due || reason) {
        ggml_instr_collect(reason != nullptr);
    }
    for (const auto & s : open) {
        if (due) {
            s->record_machine();
            s->faults_due = true;
        }
        s->log.flush();
    }
    int of_closing = 0;
    if (reason) {
        of_closing = close_all(open, reason);
    } else if (wanted) {
        make_part(open);
    }
    for (size_t i = 0; i < open.size();) {
        if (open[i].use_count() == 1) {  // another part has followed, and its last step has ended
            open[i]->close("rotated");
            spare = open[i]->log.release();
            open.erase(open.begin() + (ptrdiff_t) i);
        } else {
            i++;
        }
    }
    lock.lock();
    flushed = number;
    if (reason) {
        closed = true;
        status = of_closing;
    }
    lock.unlock();
    done.notify_all();
}

void writer::make_part(parts & open) {
    const auto & full = open.back();
    const auto   next = full->next_part(std::exchange(spare, {}));
    const std::string path = before_suffix(full->all->asked.path, "part" + std::to_string(next->part));
    const int failure = next->start(path, {});
    if (failure != 0) {
        full->all->rotate_bytes = 0;
        tell(path + ": " + reason_of(failure) + "; recording continues in " + full->log.path());
    } else {
        open.push_back(next);
    }
    std::lock_guard<std::mutex> lock(mutex);
    wants_part = false;  // only now, so that no second part is made meanwhile
    part       = failure == 0 ? next : nullptr;
}

int writer::close_all(parts & open, const char * reason) {
    if (part) {  // nothing has followed
        part->log.discard();
        open.pop_back();
        part.reset();
    }
    int first_failure = 0;
    for (const auto & s : open) {
        const int failure = s->close(s == open.back() ? reason : "rotated");
        first_failure = first_failure == 0 ? failure : first_failure;
    }
    open.clear();
    return first_failure;
}

}  // namespace llama_instr
