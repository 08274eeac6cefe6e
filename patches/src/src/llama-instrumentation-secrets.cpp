// llama-instrumentation-secrets.cpp - see the header
//
// No regular expressions: those of the standard library recurse for every character, and an argument may be a
// whole program.

#include "llama-instrumentation-secrets.h"

#include <algorithm>
#include <cctype>
#include <string_view>

namespace llama_instr {

namespace {

const char redacted[] = "[redacted]";

bool is_separator(char c) {
    return !isalnum((unsigned char) c);
}

bool is_word(char c) {
    return isalnum((unsigned char) c) || c == '_' || c == '-';
}

std::string lower(std::string_view text) {
    std::string out(text);
    std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return (char) tolower(c); });
    return out;
}

// --api-key, HF_TOKEN, X-Auth-Token, clientSecret; not --max-tokens, --tokenizer or --author
bool names_secret(std::string_view name) {
    const std::string text = lower(name);
    for (const char * word : { "key", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "auth", "authorization" }) {
        const std::string_view w = word;
        for (size_t at = text.find(w); at != std::string::npos; at = text.find(w, at + 1)) {
            const size_t end = at + w.size();
            const bool begins = at == 0 || is_separator(text[at - 1]);
            if (end == text.size() || (begins && is_separator(text[end]))) {
                return true;
            }
        }
    }
    return false;
}

// keys of OpenAI and of those who copy their form, of Hugging Face and of GitHub
std::string without_known_keys(std::string text) {
    for (const char * prefix : { "sk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_" }) {
        const std::string_view p = prefix;
        for (size_t at = text.find(p); at != std::string::npos; at = text.find(p, at + 1)) {
            const size_t begin = at + p.size();
            const size_t end   = (size_t) (std::find_if_not(text.begin() + (long) begin, text.end(), is_word) - text.begin());
            if ((at == 0 || !is_word(text[at - 1])) && end - begin >= 8) {
                text.replace(at, end - at, redacted);
            }
        }
    }
    return text;
}

// scheme://user:password@host
std::string without_passwords(std::string text) {
    for (size_t at = text.find("://"); at != std::string::npos; at = text.find("://", at + 3)) {
        const size_t end   = text.find('@', at);
        const size_t begin = text.find(':', at + 3);
        const size_t slash = text.find('/', at + 3);
        if (end != std::string::npos && begin < end && end < slash) {
            text.replace(begin + 1, end - begin - 1, redacted);
        }
    }
    return text;
}

class redaction {
  public:
    std::string next(const std::string & argument) {
        if (argument.find_first_of(" \t\n") == std::string::npos) {
            return word(argument);
        }
        redaction inner;
        std::string out, part;
        for (const char c : argument) {
            if (c == ' ' || c == '\t' || c == '\n') {
                out += inner.word(part) + c;
                part.clear();
            } else {
                part += c;
            }
        }
        value_follows = false;
        return out + inner.word(part);
    }

  private:
    bool value_follows = false;

    std::string word(const std::string & text) {
        if (text.empty()) {
            return text;
        }
        const bool is_value = value_follows && text[0] != '-';
        value_follows = false;
        if (is_value) {
            const std::string scheme = lower(text);
            value_follows = scheme == "bearer" || scheme == "basic";
            return value_follows ? text : redacted;
        }
        const size_t at = text.find_first_of("=:");
        if (!names_secret(std::string_view(text).substr(0, at))) {
            return without_passwords(without_known_keys(text));
        }
        if (at != std::string::npos && at + 1 < text.size()) {
            return text.substr(0, at + 1) + redacted;
        }
        value_follows = text[0] == '-' || at != std::string::npos;
        return text;
    }
};

}  // namespace

std::vector<std::string> without_secrets(const std::vector<std::string> & arguments) {
    redaction r;
    std::vector<std::string> out;
    out.reserve(arguments.size());
    for (const auto & argument : arguments) {
        out.push_back(r.next(argument));
    }
    return out;
}

}  // namespace llama_instr
