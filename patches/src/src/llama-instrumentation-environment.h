// llama-instrumentation-environment.h - what `instr exec` asks for in the environment, and the names of its logs

#pragma once

#include "llama-instrumentation-file.h"

#include <cstdint>
#include <string>

namespace [[gnu::visibility("hidden")]] llama_instr {

// the settings of a session
struct request {
    std::string path;
    std::string level = "detailed";
    std::string args;   // JSON
    std::string stats;  // a pattern
    int32_t     flags = 0;
    held_file::existing found;  // at `path`
    uint64_t    rotate_bytes  = 0;
    bool        removes_parts = false;  // of the log that is replaced
};

// the settings from `instr exec`; an empty path if there are none
request request_of_environment();
// session.log, part2 -> session.part2.log
std::string before_suffix(const std::string & path, const std::string & text);
// removes the later parts of the recording whose log `path` was, logs only
void remove_parts(const std::string & path);

}  // namespace llama_instr
