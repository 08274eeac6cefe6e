// threadpool.cpp - decodes with threads that live on between computes, while contexts come and go
//
//     threadpool MODEL.gguf LOG CONTEXTS DECODES
//
// Built without OpenMP, ggml's workers may still be inside of a compute's last barrier when the call has returned and the
// context is freed.

#include "llama.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include "llama-instrumentation.h"

#include <cstdio>
#include <cstdlib>

template <typename F> static F cpu_function(const char * name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    return (F) ggml_backend_reg_get_proc_address(reg, name);
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s MODEL.gguf LOG CONTEXTS DECODES\n", argv[0]);
        return 2;
    }
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    ggml_threadpool_params pool_params = {};
    pool_params.n_threads = 2;
    pool_params.poll      = 50;
    ggml_threadpool * pool = cpu_function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&pool_params);
    if (!model || !pool || llama_instr_begin(argv[2], "verbose", nullptr, nullptr, 0) != 0) {
        fprintf(stderr, "threadpool: %s\n", llama_instr_error());
        return 1;
    }
    for (int i = 0; i < atoi(argv[3]); i++) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx     = 64;
        params.n_threads = params.n_threads_batch = 2;
        llama_context * ctx = llama_init_from_model(model, params);
        llama_attach_threadpool(ctx, pool, pool);
        for (int k = 0; k < atoi(argv[4]); k++) {
            llama_token token = 7;
            llama_memory_clear(llama_get_memory(ctx), false);
            if (llama_decode(ctx, llama_batch_get_one(&token, 1)) != 0) {
                return 1;
            }
        }
        llama_free(ctx);
    }
    const int status = llama_instr_end();
    cpu_function<decltype(&ggml_threadpool_free)>("ggml_threadpool_free")(pool);
    llama_model_free(model);
    return status == 0 ? 0 : 1;
}
