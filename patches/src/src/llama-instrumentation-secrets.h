// llama-instrumentation-secrets.h - what a log does not say of a command line

#pragma once

#include <string>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

// The arguments with `[redacted]` for what looks like a secret: VALUE in `--NAME VALUE`, `--NAME=VALUE`, `NAME=VALUE`
// and `NAME: VALUE` where NAME is that of a secret; keys of known services, and passwords in URLs. An argument of
// several words, as of `sh -c`, is looked at word by word.
std::vector<std::string> without_secrets(const std::vector<std::string> & arguments);

}  // namespace llama_instr
