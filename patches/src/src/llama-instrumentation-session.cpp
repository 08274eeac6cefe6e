// llama-instrumentation-session.cpp - a session from its first line to its last

#include "llama-instrumentation-session.h"

#include "llama-instrumentation-host.h"
#include "llama-instrumentation-recorder.h"
#include "llama-instrumentation-records.h"
#include "llama-instrumentation-schema.h"
#include "llama-instrumentation-thread.h"

#include "llama-instrumentation.h"

#include <cstring>
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
    machine = machine_counts::now();
    log.on_much = [this] { all->files.wake(); };
    const int status = log.open(path.c_str(), found);
    if (status != 0) {
        return status;
    }
    // a log that cannot be written is reported once, and ends the program if the user asked for that
    log.on_failure = [this](int error) {
        const bool stop = (flags & LLAMA_INSTR_STOP_ON_ERROR) != 0;
        tell(log.path() + " cannot be written (" + reason_of(-error) + "): " +
             (stop ? "stopping, as asked" : "inference goes on, events are dropped and counted"));
        if (stop) {
            _exit(74);
        }
    };
    if (log.failed()) {
        log.fail(log.failed());
    }
    return 0;
}

std::shared_ptr<session> session::next_part() const {
    auto next = std::make_shared<session>();
    next->all           = all;
    next->part          = part + 1;
    next->detail        = detail;
    next->flags         = flags;
    next->stats_pattern = stats_pattern;
    next->stats         = stats;
    write_session_start(*next);
    return next;
}

void session::record_machine() {
    if (!worked.exchange(has_steps())) {
        return;
    }
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
        line.kv(LLAMA_INSTR_K_DROPPED, totals.dropped + (uint64_t) steps.load());  // the ends of these steps
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

}  // namespace llama_instr
