// llama-instrumentation-rpc.cpp - connections of ggml's RPC backend, and what clients let a server compute
//
// A client may send a server anything. So a graph is looked at before anything of it is named, and what clients can make the
// log grow by is limited.

#include "llama-instrumentation-records.h"
#include "llama-instrumentation-thread.h"

#include <algorithm>
#include <netdb.h>
#include <sys/socket.h>
#include <utility>

namespace llama_instr {

namespace {

// of ggml-rpc.cpp, which keeps them to itself
enum rpc_code { GRAPH_COMPUTE = 10, GRAPH_RECOMPUTE = 16 };

std::atomic<int> served_threads { 1 };  // of a server's CPU backend

// one end of a connection, whether a session is open or not
struct rpc_connection {
    int         id;
    bool        is_server;
    std::string local, peer, endpoint;
    uint64_t    commands = 0;
};

struct alignas(8) rpc_record {
    ggml_instr_rpc_command command;
    uint64_t number;
    int32_t  connection;
    bool     is_server;

    void format(std::string_view, log_lines & lines) const { lines.gather(connection, format_many, *this); }

  private:
    // a line for each run of consecutive commands
    static void format_many(const void * records, size_t n, log_lines & lines) {
        const auto * of = (const rpc_record *) records;
        for (size_t i = 0, end; i < n; i = end) {
            for (end = i + 1; end < n && of[end].number == of[end - 1].number + 1; end++) {
            }
            format_run(of + i, end - i, lines);
        }
    }

    static void format_run(const rpc_record * of, size_t n, log_lines & lines) {
        json_line & line = lines.begin(LLAMA_INSTR_EV_RPC, of->command.begin);
        const auto column = [&](const char * key, auto get) {
            line.column(key, n, [of, get](size_t i) { return get(of[i].command); });
        };
        line.kv(LLAMA_INSTR_K_CONNECTION, of->connection).kv(LLAMA_INSTR_K_FIRST, of->number);
        column(LLAMA_INSTR_K_COMMAND, [](const auto & c) { return c.code; });
        column(LLAMA_INSTR_K_REQUEST, [](const auto & c) { return c.request; });
        column(LLAMA_INSTR_K_REPLY,   [](const auto & c) { return c.reply; });
        line.column(LLAMA_INSTR_K_GAP, n, [of](size_t i) { return i == 0 ? 0 : of[i].command.begin - of[i - 1].command.end; });
        if (of->is_server) {
            column(LLAMA_INSTR_K_RECEIVE, [](const auto & c) { return c.complete - c.begin; });
            column(LLAMA_INSTR_K_WORK,    [](const auto & c) { return c.done - c.complete; });
            column(LLAMA_INSTR_K_ANSWER,  [](const auto & c) { return c.end - c.done; });
        } else {
            // HELLO is not queued
            column(LLAMA_INSTR_K_QUEUE, [](const auto & c) { return c.origin.queued > 0 ? c.begin - c.origin.queued : 0; });
            column(LLAMA_INSTR_K_SEND,  [](const auto & c) { return c.complete - c.begin; });
            column(LLAMA_INSTR_K_WAIT,  [](const auto & c) { return c.end - c.complete; });
        }
        const auto ids = [&](const char * key, auto get) {
            if (std::any_of(of, of + n, [get](const rpc_record & r) { return get(r.command.origin) >= 0; })) {
                column(key, [get](const auto & c) { return get(c.origin); });
            }
        };
        ids(LLAMA_INSTR_K_STEP,    [](const auto & origin) { return origin.step; });
        ids(LLAMA_INSTR_K_COMPUTE, [](const auto & origin) { return origin.compute; });
        ids(LLAMA_INSTR_K_SPLIT,   [](const auto & origin) { return origin.split; });
        line.end();
    }
};

struct alignas(8) connection_end_record {
    uint64_t t, commands;
    int32_t  connection;
    ggml_instr_rpc_reason reason;

    void format(std::string_view, log_lines & lines) const {
        static const char * const reasons[] = { "closed", "peer", "failed" };
        lines.format_gathered(connection);
        json_line & line = lines.begin(LLAMA_INSTR_EV_CONNECTION_END, t);
        line.kv(LLAMA_INSTR_K_CONNECTION, connection).kv(LLAMA_INSTR_K_REASON, reasons[reason]);
        line.kv(LLAMA_INSTR_K_COMMANDS, commands);
        line.end();
    }
};

// "10.0.0.1:50052", as getsockname() or getpeername() says
template <typename F> std::string address(int socket, F get) {
    sockaddr_storage storage = {};
    auto * const of = (sockaddr *) &storage;
    socklen_t size = sizeof(storage);
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (get(socket, of, &size) != 0 || getnameinfo(of, size, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return "";
    }
    return std::string(host) + ":" + port;
}

// describes the connection unless this part of the log has done so
void write_connection(log_part & s, const rpc_connection & of, uint64_t t) {
    {
        std::lock_guard<std::mutex> lock(s.connections_mutex);
        if (!s.connections.insert(of.id).second) {
            return;
        }
    }
    json_line & line = line_buffer().begin(LLAMA_INSTR_EV_CONNECTION, t);
    line.kv(LLAMA_INSTR_K_CONNECTION, of.id).kv(LLAMA_INSTR_K_SIDE, of.is_server ? "server" : "client");
    line.kv(LLAMA_INSTR_K_LOCAL, of.local).kv(LLAMA_INSTR_K_PEER, of.peer);
    if (!of.is_server) {
        line.kv(LLAMA_INSTR_K_ENDPOINT, of.endpoint);
    }
    s.write(LLAMA_INSTR_EV_CONNECTION, line);
}

std::shared_ptr<log_part> part_or_null() {
    return llama_instr_enabled() ? current_part() : nullptr;
}

//
// what clients may make a server write
//

// Bytes of the log, about. What one second leaves may be used in a later one, up to a limit.
class allowance {
  public:
    bool take(uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mutex);
        const uint64_t now = ggml_instr_clock_ns();
        left = std::min(most, left + (now - last) / 1000 * per_microsecond);
        last = now;
        const bool there = bytes <= left;
        left -= there ? bytes : 0;
        return there;
    }

  private:
    static constexpr uint64_t per_microsecond = 16;  // a decode of 300 kernels each millisecond takes a third of that
    static constexpr uint64_t most = 256 << 20;

    std::mutex mutex;
    uint64_t   left = most;
    uint64_t   last = ggml_instr_clock_ns();
};

allowance & of_clients() {
    static allowance * const bytes = new allowance;
    return *bytes;
}

constexpr uint64_t bytes_of_command = 80;
constexpr uint64_t bytes_of_compute = 300;
constexpr uint64_t bytes_of_kernel  = 15;
constexpr uint64_t bytes_of_node    = 300;
constexpr int      most_nodes       = 1 << 16;

// nothing that the log could not hold, or that a reader would refuse
bool is_sound(const ggml_tensor * t) {
    return (uint32_t) t->op < GGML_OP_COUNT && ggml_nbytes(t) <= LLAMA_INSTR_MOST;
}

bool is_sound(ggml_cgraph * gf) {
    const int n = ggml_graph_n_nodes(gf);
    for (int i = 0; i < std::min(n, most_nodes); i++) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        const auto is_bad = [](const ggml_tensor * src) { return src && !is_sound(src); };
        if (!node || !is_sound(node) || std::any_of(std::begin(node->src), std::end(node->src), is_bad)) {
            return false;
        }
    }
    return n > 0 && n <= most_nodes;
}

//
// connections
//

void * open_connection(int socket, const char * endpoint) {
    static std::atomic<int> next { 0 };
    auto * const made = new rpc_connection;
    made->id        = next++;
    made->is_server = !endpoint;
    made->local     = address(socket, getsockname);
    made->peer      = address(socket, getpeername);
    made->endpoint  = endpoint ? endpoint : "";
    return made;
}

void record_command(void * connection, const ggml_instr_rpc_command * command) {
    auto & of = *(rpc_connection *) connection;
    rpc_record record = {};
    record.command    = *command;
    record.number     = of.commands++;
    record.connection = of.id;
    record.is_server  = of.is_server;
    auto & origin = record.command.origin;
    if (of.is_server) {
        origin = { 0, -1, std::exchange(tl().served, -1), -1 };
    } else if (origin.compute >= 0 && command->code != GRAPH_COMPUTE && command->code != GRAPH_RECOMPUTE) {
        origin.split++;  // the inputs of a split are copied before it is computed
    }
    const auto s = part_or_null();
    if (!s) {
        return;
    }
    if (of.is_server && !of_clients().take(bytes_of_command)) {
        s->log.drop(1);
        return;
    }
    write_connection(*s, of, record.number == 0 ? command->end : command->begin);
    s->add(record);
}

void close_connection(void * connection, ggml_instr_rpc_reason reason) {
    const std::unique_ptr<rpc_connection> of((rpc_connection *) connection);
    const auto s = of->commands > 0 ? part_or_null() : nullptr;
    if (s) {
        const uint64_t now = ggml_instr_clock_ns();
        write_connection(*s, *of, now);
        s->add(connection_end_record { now, of->commands, of->id, reason });
    }
    if (reason == GGML_INSTR_RPC_FAILED && !of->is_server) {  // ggml ends the process now
        if (s) {
            s->all->files.flush();
        }
        tell_reason("the RPC server " + of->endpoint + " has gone, or has refused a command");
    }
}

// of what the calling thread queues
void find_origin(ggml_instr_rpc_origin * origin) {
    origin->queued = ggml_instr_clock_ns();
    const auto & t = tl();
    if (!llama_instr_enabled() || t.step.depth > 1) {
        return;
    }
    origin->step = t.step.depth > 0 ? t.step.id : -1;
    if (t.compute.s && t.compute.recorded) {
        origin->compute = t.compute.times.compute;
        origin->split   = t.compute.state->sink.split;
    }
}

//
// a server's computes
//

void begin_serving(int n_threads) {
    served_threads = std::max(n_threads, 1);
    close_at_signals();
}

// the backend's latest graph, if it is kept, as the last one
graph_state * graph_again(context_state & state, ggml_backend_t backend) {
    const auto known = state.served.find(backend);
    const int  id    = known != state.served.end() ? known->second : -1;
    auto & graphs = state.graphs;
    const auto at = std::find_if(graphs.begin(), graphs.end(), [id](const auto & graph) { return graph->id == id; });
    if (at == graphs.end()) {
        return nullptr;
    }
    std::rotate(at, std::next(at), graphs.end());
    return graphs.back().get();
}

// nullptr if it is not recorded; `again`: this part of the log has it, if the client asks for the one before
graph_state * graph_of_client(log_part & s, context_state & state, ggml_backend_t backend, ggml_cgraph * gf, bool & again) {
    graph_state * found = again ? graph_again(state, backend) : nullptr;
    again = found;
    if (!found) {
        if (!is_sound(gf) || !of_clients().take((uint64_t) ggml_graph_n_nodes(gf) * bytes_of_node)) {
            state.served.erase(backend);
            return nullptr;
        }
        state.backend    = backend;
        state.has_device = has_memory(ggml_backend_get_device(backend));
        found = &graph_of(s, state, gf, "rpc", false, nullptr);
        state.served[backend] = found->id;
    }
    return found->written && of_clients().take(bytes_of_compute + found->layers.size() * bytes_of_kernel) ? found : nullptr;
}

void begin_compute(ggml_backend_t backend, ggml_cgraph * gf, bool again) {
    auto & c = tl().compute;
    if (!llama_instr_enabled() || c.s) {
        return;
    }
    const auto s = part_of_step();
    if (!s) {
        return;
    }
    const uint64_t begin = ticks_now();
    c.state = &s->known.of_server();
    c.graph = graph_of_client(*s, *c.state, backend, gf, again);
    if (!c.graph) {
        s->dropped_ops += (uint64_t) ggml_graph_n_nodes(gf);
        s->step_ends();
        return;
    }
    c.s         = s;
    c.gf        = gf;
    c.n_threads = served_threads;
    c.again     = again;
    c.begin_kernels();
    ggml_instr_split_begin(0, 0, c.graph->splits_matter);
    c.times.begin = ticks_now();
    s->overhead_ticks += c.times.begin - begin;
}

void end_compute() {
    auto & t = tl();
    auto & c = t.compute;
    if (!c.s || c.state->ctx) {
        return;
    }
    c.times.end = ticks_now();
    ggml_instr_split_end();
    ggml_instr_set_sink(nullptr);
    compute_record record = {};
    record.begin     = c.times.begin;
    record.end       = c.times.end;
    record.compute   = t.served = c.times.compute;
    record.graph     = c.graph->id;
    record.ctx       = record.step = -1;
    record.n_threads = c.n_threads;
    record.reused    = c.again;
    record.source    = "rpc";
    c.s->add(record);
    c.end_kernels();
    const auto s = std::move(c.s);
    s->overhead_ticks += ticks_now() - c.times.end;
    s->step_ends();
}

}  // namespace

const ggml_instr_rpc_recorder rpc_recorder = {
    open_connection, record_command, close_connection, find_origin, begin_serving, begin_compute, end_compute,
};

}  // namespace llama_instr
