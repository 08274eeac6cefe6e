// decode_times.cpp - how long each llama_decode takes, seen by its caller, while a session is open
//
//     decode_times MODEL.gguf LOG N_THREADS N_DECODES
//
// Prints the nanoseconds of the prefill and of every decode, one a line.

#include "llama.h"

#include "llama-instrumentation.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

static long long now_ns() {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (long long) ts.tv_sec * 1000000000 + ts.tv_nsec;
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s MODEL.gguf LOG N_THREADS N_DECODES\n", argv[0]);
        return 2;
    }
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    if (llama_instr_begin(argv[2], "detailed", nullptr, nullptr, 0) != 0) {
        fprintf(stderr, "%s\n", llama_instr_error());
        return 1;
    }
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = 512;
    params.n_threads       = atoi(argv[3]);
    params.n_threads_batch = params.n_threads;
    llama_context * ctx = model ? llama_init_from_model(model, params) : nullptr;
    if (!ctx) {
        fprintf(stderr, "%s does not load\n", argv[1]);
        return 1;
    }
    std::vector<llama_token> prompt(40, 7);
    for (int i = 0; i <= atoi(argv[4]); i++) {
        llama_token token = 11;
        llama_batch batch = i == 0 ? llama_batch_get_one(prompt.data(), (int32_t) prompt.size()) : llama_batch_get_one(&token, 1);
        const long long begin = now_ns();
        const int status = llama_decode(ctx, batch);
        const long long end = now_ns();
        if (status != 0) {
            return 1;
        }
        printf("%lld\n", end - begin);
    }
    llama_free(ctx);
    llama_model_free(model);
    return llama_instr_end() == 0 ? 0 : 1;
}
