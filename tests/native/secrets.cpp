// secrets.cpp - prints its arguments as a log would hold them, one a line
//
//     secrets ARGUMENT...

// the library keeps these names to itself
#include "llama-instrumentation-secrets.cpp"  // NOLINT(bugprone-suspicious-include)

#include <cstdio>

int main(int argc, char ** argv) {
    for (const auto & argument : llama_instr::without_secrets({ argv + 1, argv + argc })) {
        puts(argument.c_str());
    }
    return 0;
}
