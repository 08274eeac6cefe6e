// late_context.cpp - sessions that end while another thread makes a context
//
//     late_context MODEL.gguf DIRECTORY SESSIONS
//
// The sessions end at as many moments, from before the context is made until after it was freed.

#include "llama.h"

#include "llama-instrumentation.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MODEL.gguf DIRECTORY SESSIONS\n", argv[0]);
        return 2;
    }
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        return 1;
    }
    const auto use_context = [model] {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = 128;
        llama_free(llama_init_from_model(model, params));
    };
    const auto begin = std::chrono::steady_clock::now();
    use_context();
    const auto whole = std::chrono::steady_clock::now() - begin;
    const int  n_sessions = atoi(argv[3]);
    int n_failed = 0;
    for (int i = 0; i < n_sessions; i++) {
        const std::string path = std::string(argv[2]) + "/" + std::to_string(i) + ".log";
        n_failed += llama_instr_begin(path.c_str(), "minimal", nullptr, nullptr, 0) != 0;
        std::thread other(use_context);
        std::this_thread::sleep_for(whole * i / n_sessions);
        n_failed += llama_instr_end() != 0;
        other.join();
    }
    llama_model_free(model);
    llama_backend_free();
    return n_failed == 0 ? 0 : 1;
}
