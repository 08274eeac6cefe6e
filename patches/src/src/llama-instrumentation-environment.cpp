// llama-instrumentation-environment.cpp - the settings that `instr exec` passes in the environment, and the names of its logs

#include "llama-instrumentation-environment.h"

#include "llama-instrumentation.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <unistd.h>

namespace llama_instr {

namespace {

std::string environment(const char * name) {
    const char * value = getenv(name);
    return value ? value : "";
}

std::string replace_pid(std::string path) {
    for (size_t at; (at = path.find("%p")) != std::string::npos;) {
        path.replace(at, 2, std::to_string(getpid()));
    }
    return path;
}

// "DEVICE:INODE" of the log that may be replaced: one process of the command replaces it, and the others then
// find another file there
held_file::existing file_to_replace(const std::string & text) {
    held_file::existing found;
    char * end = nullptr;
    found.dev     = (dev_t) strtoull(text.c_str(), &end, 10);
    found.ino     = *end == ':' ? (ino_t) strtoull(end + 1, nullptr, 10) : 0;
    found.replace = found.ino != 0;
    return found;
}

}  // namespace

request request_of_environment() {
    request asked;
    asked.path = replace_pid(environment("LLAMA_INSTR_LOG"));
    const std::string level = environment("LLAMA_INSTR_LEVEL");
    if (!level.empty()) {
        asked.level = level;
    }
    asked.args  = environment("LLAMA_INSTR_ARGS");
    asked.stats = environment("LLAMA_INSTR_STATS");
    asked.flags = environment("LLAMA_INSTR_ON_ERROR") == "stop" ? LLAMA_INSTR_STOP_ON_ERROR : 0;
    asked.found = file_to_replace(environment("LLAMA_INSTR_OVERWRITE"));
    asked.rotate_bytes  = strtoull(environment("LLAMA_INSTR_ROTATE").c_str(), nullptr, 10);
    asked.removes_parts = asked.rotate_bytes > 0 && !environment("LLAMA_INSTR_OVERWRITE").empty();
    return asked;
}

std::string before_suffix(const std::string & path, const std::string & text) {
    const size_t slash = path.find_last_of('/');
    const size_t dot   = path.find_last_of('.');
    const bool   has_suffix = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1);
    const size_t at = has_suffix ? dot : path.size();
    return path.substr(0, at) + "." + text + path.substr(at);
}

void remove_parts(const std::string & path) {
    // a part's name is `before`, digits, `after`
    const std::string any    = before_suffix(path, "part*");
    const size_t      star   = any.find_last_of('*');
    const std::string before = any.substr(0, star), after = any.substr(star + 1);
    const std::filesystem::path directory = std::filesystem::path(path).parent_path();
    std::error_code error;
    for (const auto & entry : std::filesystem::directory_iterator(directory.empty() ? "." : directory, error)) {
        const std::string name = (directory / entry.path().filename()).string();
        const size_t n = std::min(name.size(), before.size() + after.size());
        const size_t n_digits = name.size() - n;
        const bool is_part = n_digits > 0 && name.compare(0, before.size(), before) == 0 &&
                             name.compare(name.size() - after.size(), after.size(), after) == 0;
        const std::string number = is_part ? name.substr(before.size(), n_digits) : "";
        if (is_part && std::all_of(number.begin(), number.end(), isdigit) && number[0] != '0' && number != "1") {
            remove_log(name.c_str());
        }
    }
}

}  // namespace llama_instr
