// compute_team.cpp - the threads that a compute leaves in the sink
//
//     compute_team MODEL THREADS
//
// Decodes a token and prints for how many parts, on how many threads, the compute's team runs a function.

#include "ggml-instrumentation.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

struct calls {
    std::mutex                mutex;
    std::set<int32_t>         parts;
    std::set<std::thread::id> threads;
};

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL THREADS\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx     = 64;
    params.n_threads = params.n_threads_batch = atoi(argv[2]);
    llama_context * ctx = llama_init_from_model(model, params);

    ggml_instr_sink sink = {};
    ggml_instr_sink_reset(&sink, 1, 4096, 16);
    ggml_instr_set_sink(&sink);
    llama_token token = 7;
    const int failed = llama_decode(ctx, llama_batch_get_one(&token, 1));
    ggml_instr_set_sink(nullptr);

    calls all;
    if (sink.team.run) {
        sink.team.run(sink.team.n_threads, [](int32_t i, void * data) {
            calls & all = *(calls *) data;
            std::lock_guard<std::mutex> lock(all.mutex);
            all.parts.insert(i);
            all.threads.insert(std::this_thread::get_id());
        }, &all);
    }
    printf("%zu %zu\n", all.parts.size(), all.threads.size());

    ggml_instr_sink_free(&sink);
    llama_free(ctx);
    llama_model_free(model);
    return failed;
}
