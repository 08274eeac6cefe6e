// models_come_and_go.cpp - threads that load a model, decode and free it, in a loop, while the log rotates
//
//     LLAMA_INSTR_LOG=... LLAMA_INSTR_ROTATE=... models_come_and_go MODEL.gguf SECONDS
//
// One more thread decodes in one context throughout. A context that is freed while another thread begins the
// next part of the log must be forgotten in both parts.

#include "llama.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using clock_type = std::chrono::steady_clock;

static void require(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "models_come_and_go: %s\n", what);
        exit(1);
    }
}

static llama_model * load(const char * path) {
    llama_model * model = llama_model_load_from_file(path, llama_model_default_params());
    require(model != nullptr, "no model");
    return model;
}

static llama_context * new_context(llama_model * model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = 64;
    params.n_batch         = 64;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    llama_context * ctx = llama_init_from_model(model, params);
    require(ctx != nullptr, "no context");
    return ctx;
}

// every operation on the memory makes the recorder look for the context that owns it
static void decode_some(llama_context * ctx, int n) {
    llama_memory_t memory = llama_get_memory(ctx);
    llama_memory_clear(memory, false);
    llama_token token = 7;
    for (int i = 0; i < n; i++) {
        require(llama_decode(ctx, llama_batch_get_one(&token, 1)) == 0, "decode");
        llama_memory_seq_rm(memory, 0, i, -1);
        require(llama_decode(ctx, llama_batch_get_one(&token, 1)) == 0, "decode");
    }
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL.gguf SECONDS\n", argv[0]);
        return 2;
    }
    const char * path  = argv[1];
    const auto   until = clock_type::now() + std::chrono::seconds(atoi(argv[2]));
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);

    // before the threads: the first load sets up ggml's buffer types, which llama.cpp does without a lock
    llama_model   * own_model = load(path);
    llama_context * own_ctx   = new_context(own_model);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; i++) {
        threads.emplace_back([path, until] {
            while (clock_type::now() < until) {
                llama_model * model = load(path);
                for (int j = 0; j < 3; j++) {
                    llama_context * ctx = new_context(model);
                    decode_some(ctx, 5);
                    llama_free(ctx);
                }
                llama_model_free(model);
            }
        });
    }
    while (clock_type::now() < until) {
        decode_some(own_ctx, 30);
    }
    for (auto & thread : threads) {
        thread.join();
    }
    llama_free(own_ctx);
    llama_model_free(own_model);
    puts("models_come_and_go: passed");
    return 0;
}
