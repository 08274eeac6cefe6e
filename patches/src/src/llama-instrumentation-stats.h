// llama-instrumentation-stats.h - reads the values of nodes, selected by name

#pragma once

#include "ggml.h"

namespace [[gnu::visibility("hidden")]] llama_instr {

// the scheduler's eval callback that reads the values of matching nodes
bool stats_callback(ggml_tensor * t, bool ask, void * user_data);

}  // namespace llama_instr
