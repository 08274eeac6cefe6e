// slow_tensors.cpp - a library for LD_PRELOAD: ggml takes 100 microseconds to find the next tensor of a context

#include "ggml.h"

#include <chrono>
#include <dlfcn.h>

struct ggml_tensor * ggml_get_next_tensor(const struct ggml_context * ctx, struct ggml_tensor * tensor) {
    static const auto next = (decltype(&ggml_get_next_tensor)) dlsym(RTLD_NEXT, "ggml_get_next_tensor");
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    while (std::chrono::steady_clock::now() < until) {
    }
    return next(ctx, tensor);
}
