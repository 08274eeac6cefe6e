// broken_kernel.cpp - ggml's CPU backend with a fault in one kernel
//
// A library for LD_PRELOAD. It stands before the kernels that libggml-cpu calls by their exported names, and calls
// the real one with a mistake that programmers make. The variable BROKEN_KERNEL has the op with the fault.

#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

struct ggml_compute_params;

using kernel = void (*)(const ggml_compute_params *, ggml_tensor *);

static kernel real(const char * name) {
    void * library = dlopen("libggml-cpu.so.0", RTLD_LAZY | RTLD_NOLOAD);
    void * found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        std::fprintf(stderr, "broken_kernel: no %s in a loaded libggml-cpu\n", name);
        std::abort();
    }
    return reinterpret_cast<kernel>(found);
}

static bool is_broken(const char * op) {
    const char * chosen = std::getenv("BROKEN_KERNEL");
    return chosen && std::strcmp(chosen, op) == 0;
}

extern "C" {

// rotates the pairs (i, i + n/2) where the model has (i, i + 1), and the reverse
void ggml_compute_forward_rope(const ggml_compute_params * params, ggml_tensor * dst) {
    static const kernel run = real("ggml_compute_forward_rope");
    static const bool broken = is_broken("ROPE");
    ggml_tensor node = *dst;
    if (broken) {
        node.op_params[2] ^= GGML_ROPE_TYPE_NEOX;
    }
    run(params, &node);
}

// applies the function to the value and not to the gate
void ggml_compute_forward_glu(const ggml_compute_params * params, ggml_tensor * dst) {
    static const kernel run = real("ggml_compute_forward_glu");
    static const bool broken = is_broken("GLU");
    ggml_tensor node = *dst;
    if (broken) {
        node.src[0] = dst->src[1];
        node.src[1] = dst->src[0];
    }
    run(params, &node);
}

// forgets the mask, so tokens see those after them
void ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * dst) {
    static const kernel run = real("ggml_compute_forward_flash_attn_ext");
    static const bool broken = is_broken("FLASH_ATTN_EXT");
    ggml_tensor node = *dst;
    if (broken) {
        node.src[3] = nullptr;
    }
    run(params, &node);
}

// reads epsilon from the wrong place: it is 1
void ggml_compute_forward_rms_norm(const ggml_compute_params * params, ggml_tensor * dst) {
    static const kernel run = real("ggml_compute_forward_rms_norm");
    static const bool broken = is_broken("RMS_NORM");
    ggml_tensor node = *dst;
    if (broken) {
        const float eps = 1.0f;
        std::memcpy(node.op_params, &eps, sizeof eps);
    }
    run(params, &node);
}
}
