// ggml-rpc-instrumentation.h - what the RPC backend's client and server tell the recorder
//
// Every socket has a link. One thread at a time uses it: that of a client's queue, or that which serves.

#pragma once

#include "ggml-instrumentation.h"

#include <cstddef>
#include <cstdint>

class ggml_instr_rpc_link {
  public:
    ggml_instr_rpc_link() = default;
    ggml_instr_rpc_link(const ggml_instr_rpc_link &) = delete;
    ggml_instr_rpc_link & operator=(const ggml_instr_rpc_link &) = delete;

    ~ggml_instr_rpc_link() {
        close(under_way ? GGML_INSTR_RPC_FAILED : is_server ? GGML_INSTR_RPC_PEER : GGML_INSTR_RPC_CLOSED);
    }

    // -- a client

    // HELLO was answered
    void opened(int socket, const char * endpoint) {
        if (recorder) {
            connection = recorder->open(socket, endpoint);
            ended(true);
        }
    }

    // the next command was queued there
    void queued(const ggml_instr_rpc_origin & origin) { now.origin = origin; }

    void sending(int code, size_t bytes) {
        now.request = 1 + sizeof(uint64_t) + bytes;
        begin(code);
    }

    // these return true, so that they can follow what may fail
    bool sent() {
        now.complete = now.end = time();
        return true;
    }

    bool answered(size_t bytes) {
        now.reply = sizeof(uint64_t) + bytes;
        now.end   = time();
        return true;
    }

    // the command, before a failed one aborts the process
    void ended(bool ok) {
        if (ok) {
            report();
        } else {
            close(GGML_INSTR_RPC_FAILED);
        }
    }

    // -- a server, which also calls answered()

    void accepted(int socket) {
        is_server = true;
        if (recorder) {
            connection = recorder->open(socket, nullptr);
        }
    }

    void arrived(int code) { begin(code); }

    bool received(size_t bytes) {
        now.request  = 1 + sizeof(uint64_t) + bytes;
        now.complete = time();
        return true;
    }

    void answering() { now.done = time(); }

    // the command before, if there was one
    void served() {
        if (under_way) {
            if (now.reply == 0) {
                now.done = now.end = time();
            }
            report();
        }
    }

  private:
    const ggml_instr_rpc_recorder * recorder = ggml_instr_get_rpc_recorder();
    void * connection = nullptr;
    bool   is_server  = false;
    bool   under_way  = false;
    ggml_instr_rpc_command now = { 0, 0, 0, 0, 0, 0, { 0, -1, -1, -1 }, 0 };

    uint64_t time() const { return recorder ? ggml_instr_clock_ns() : 0; }

    void begin(int code) {
        now.code  = code;
        now.reply = 0;
        now.begin = time();
        under_way = true;
    }

    void report() {
        under_way = false;
        if (connection) {
            recorder->command(connection, &now);
        }
    }

    void close(ggml_instr_rpc_reason reason) {
        if (connection) {
            recorder->close(connection, reason);
        }
        connection = nullptr;
    }
};

// a member of what is queued
struct ggml_instr_rpc_queued {
    ggml_instr_rpc_origin origin = { 0, -1, -1, -1 };

    ggml_instr_rpc_queued() {
        if (const auto * recorder = ggml_instr_get_rpc_recorder()) {
            recorder->origin(&origin);
        }
    }
};

// around a server's compute
class ggml_instr_rpc_compute {
  public:
    ggml_instr_rpc_compute(ggml_backend * backend, ggml_cgraph * graph, bool again) : recorder(ggml_instr_get_rpc_recorder()) {
        if (recorder) {
            recorder->compute_begin(backend, graph, again);
        }
    }

    ggml_instr_rpc_compute(const ggml_instr_rpc_compute &) = delete;
    ggml_instr_rpc_compute & operator=(const ggml_instr_rpc_compute &) = delete;

    ~ggml_instr_rpc_compute() {
        if (recorder) {
            recorder->compute_end();
        }
    }

  private:
    const ggml_instr_rpc_recorder * recorder;
};

static inline void ggml_instr_rpc_serve(size_t n_threads) {
    if (const auto * recorder = ggml_instr_get_rpc_recorder()) {
        recorder->serve((int) n_threads);
    }
}
