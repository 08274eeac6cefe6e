// Makes a module for GGML_BACKEND_PATH of a wheel's Vulkan library, which is linked and not loaded.

#define GGML_BACKEND_DL
#define GGML_BACKEND_BUILD

#include "ggml-backend-impl.h"
#include "ggml-vulkan.h"

GGML_BACKEND_DL_IMPL(ggml_backend_vk_reg)
