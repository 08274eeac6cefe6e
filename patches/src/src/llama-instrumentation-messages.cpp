// llama-instrumentation-messages.cpp - see the header

#include "llama-instrumentation-messages.h"

#include "llama-instrumentation-file.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <poll.h>
#include <unistd.h>

namespace llama_instr {

namespace {

// never destroyed, like the recorder's globals
struct message_state {
    std::mutex mutex;
    held_file  standard_error;
};

message_state & messages() {
    static message_state * state = new message_state;
    return *state;
}

}  // namespace

std::mutex & messages_mutex() {
    return messages().mutex;
}

void keep_standard_error() {
    auto & m = messages();
    std::lock_guard<std::mutex> lock(m.mutex);
    m.standard_error.duplicate(STDERR_FILENO);
}

void tell(const std::string & text) {
    auto & m = messages();
    const std::string line = "llama-instr: " + text + "\n";
    std::lock_guard<std::mutex> lock(m.mutex);
    const int kept = m.standard_error.get();
    pollfd to = { kept >= 0 ? kept : STDERR_FILENO, POLLOUT, 0 };
    // no thread waits for a terminal or a pipe that takes nothing; one that is ready takes so much at once
    if (poll(&to, 1, 100) > 0 && to.revents == POLLOUT) {
        (void) !::write(to.fd, line.data(), std::min(line.size(), (size_t) PIPE_BUF));
    }
}

std::string reason_of(int status) {
    switch (-status) {
        case EBADMSG:   return "exists and is not a log, so it is not overwritten";
        case ENXIO:     return "nothing reads it";
        case ETIMEDOUT: return "the disk or the reader of the pipe has stalled";
        default:        return strerror(-status);
    }
}

}  // namespace llama_instr
