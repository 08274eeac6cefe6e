// llama-instrumentation-secrets.h - removes secrets from a command line before it is logged

#pragma once

#include <string>
#include <vector>

namespace [[gnu::visibility("hidden")]] llama_instr {

// The arguments with `[redacted]` for what looks like a secret: VALUE in `--NAME VALUE`, `--NAME=VALUE`, `NAME=VALUE`
// and `NAME: VALUE` where NAME names a secret; keys of known services; passwords in URLs. An argument of several
// words, as in `sh -c`, is searched word by word.
std::vector<std::string> without_secrets(const std::vector<std::string> & arguments);

}  // namespace llama_instr
