// llama-instrumentation-session.cpp - a session from its first line to its last

#include "llama-instrumentation-session.h"

#include "llama-instrumentation-host.h"
#include "llama-instrumentation-recorder.h"
#include "llama-instrumentation-records.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-thread.h"

#include "llama-instrumentation.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <unistd.h>
#include <utility>

namespace llama_instr {

bool parse_level(const char * text, level & out) {
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, level_names[i]) == 0) {
            out = (level) i;
            return true;
        }
    }
    return false;
}

bool session::is_debugged() const {
    return (flags & LLAMA_INSTR_DEBUGGED) != 0;
}

int session::start(const std::string & path, const held_file::existing & found) {
    int status = log.open(path.c_str(), found);
    if (status != 0) {
        return status;
    }
    write_session_start(*this);
    machine = machine_counts::now();
    status = log.begin();
    if (status != 0) {
        return status;
    }
    // a full disk is reported once, and ends the program if the user asked for that
    const auto on_failure = [this](int error) {
        const bool stop = (flags & LLAMA_INSTR_STOP_ON_ERROR) != 0;
        tell(log.path() + " cannot be written (" + strerror(error) + "): " +
             (stop ? "stopping, as asked" : "inference goes on, events are dropped and counted"));
        if (stop) {
            _exit(74);
        }
    };
    if (log.failed()) {
        on_failure(log.failed());
    } else {
        log.on_failure = on_failure;
    }
    return 0;
}

void session::record_machine() {
    if (!worked.exchange(steps > 0)) {
        return;
    }
    std::lock_guard<std::mutex> lock(looking);
    machine_counts now = machine_counts::now();
    add(now.since(machine));
    machine = std::move(now);
}

int session::close(const char * reason) {
    record_machine();
    return log.close([&](const log_file::totals & totals) {
        json_line line;
        line.begin(LLAMA_INSTR_EV_SESSION_END, ggml_instr_clock_ns());
        line.kv(LLAMA_INSTR_K_REASON, reason);
        line.object(LLAMA_INSTR_K_EVENTS);
        for (const auto & count : totals.events) {
            if (count.lines > 0) {
                line.kv(count.event, count.lines);
            }
        }
        line.close_object();
        line.kv(LLAMA_INSTR_K_BYTES, totals.bytes);
        line.kv(LLAMA_INSTR_K_DROPPED, totals.dropped);
        line.kv(LLAMA_INSTR_K_DROPPED_OPS, dropped_ops.load());
        line.kv(LLAMA_INSTR_K_DECODE_NS, totals.scale.duration(decode_ticks));
        line.kv(LLAMA_INSTR_K_OVERHEAD_NS, totals.scale.duration(overhead_ticks + totals.spent));
        return std::string(line.end());
    });
}

void session::write_mark(int64_t id, const open_mark & mark, const char * phase) {
    json_line & line = line_buffer();
    line.begin(LLAMA_INSTR_EV_MARK, ggml_instr_clock_ns());
    line.kv(LLAMA_INSTR_K_MARK, id).kv(LLAMA_INSTR_K_NAME, mark.name).kv(LLAMA_INSTR_K_PHASE, phase);
    line.kv(LLAMA_INSTR_K_THREAD, mark.thread);
    if (mark.seq >= 0) {
        line.kv(LLAMA_INSTR_K_SEQ, mark.seq);
    }
    write(LLAMA_INSTR_EV_MARK, line);
}

void session::wait_for_steps() {
    // polls, so that a step need not notify; a step that hangs must not hang the end of the session
    const uint64_t until = ggml_instr_clock_ns() + (uint64_t) 10 * 1000 * 1000 * 1000;
    while (steps > 0 && ggml_instr_clock_ns() < until) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

}  // namespace llama_instr
