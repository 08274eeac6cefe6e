// llama-instrumentation-json.h - builds NDJSON lines: numbers and keys appended to a reused buffer
//
// Formatted outside of every timed region. The text of a model, a path or a message may hold anything:
// it always ends as valid JSON.

#pragma once

#include "llama-instrumentation-digits.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

namespace [[gnu::visibility("hidden")]] llama_instr {

// bytes that grow at the end; a std::string would check and terminate at every append
class text_buffer {
  public:
    text_buffer() = default;
    text_buffer(const text_buffer &) = delete;
    text_buffer & operator=(const text_buffer &) = delete;
    ~text_buffer() { free(bytes); }

    // where at most `n` bytes may be written, until advance() says how many were
    char * room(size_t n) {
        if (capacity - used < n) {
            grow(n);
        }
        return bytes + used;
    }

    void advance(size_t n) { used += n; }
    void clear()           { used = 0; }

    void append(const void * data, size_t n) {
        if (n > 0) {
            memcpy(room(n), data, n);
            used += n;
        }
    }

    void append(char c) {
        *room(1) = c;
        used++;
    }

    char * data() { return bytes; }
    size_t size() const { return used; }
    std::string_view view() const { return { bytes ? bytes : "", used }; }

  private:
    char * bytes    = nullptr;
    size_t used     = 0;
    size_t capacity = 0;

    void grow(size_t n) {
        const size_t wanted = used + n > 2 * capacity ? used + n : 2 * capacity;
        char * larger = (char *) realloc(bytes, wanted);
        if (!larger) {
            throw std::bad_alloc();
        }
        bytes    = larger;
        capacity = wanted;
    }
};

class json_line {
  public:
    // every line begins with its event and its time; forgets what was there
    json_line & begin(const char * event, uint64_t t) {
        buf.clear();
        return begin_next(event, t);
    }

    // the same, behind the lines that were ended before
    json_line & begin_next(const char * event, uint64_t t) {
        raw("{\"event\":\"");
        raw(event);
        raw("\",\"t\":");
        integer(t);
        need_comma = true;
        return *this;
    }

    // closes the line; returns all lines, valid until the next begin()
    std::string_view end() {
        raw("}\n");
        return buf.view();
    }

    void append(std::string_view whole_lines) { buf.append(whole_lines.data(), whole_lines.size()); }
    void clear() { buf.clear(); }
    std::string_view lines() const { return buf.view(); }

    // a bare array instead of a line
    json_line & begin_array() {
        buf.clear();
        buf.append('[');
        need_comma = false;
        return *this;
    }

    std::string end_array() {
        buf.append(']');
        return std::string(buf.view());
    }

    // keys are literals
    template <size_t N, typename T> json_line & kv(const char (&name)[N], const T & v) {
        literal_key(name);
        value(v);
        return *this;
    }

    // a column of numbers, taken from `n` items by `get`
    template <size_t N, typename F> json_line & column(const char (&name)[N], size_t n, F get) {
        literal_key(name);
        buf.append('[');
        if constexpr (std::is_integral_v<decltype(get((size_t) 0))>) {
            integers(n, get);
        } else {
            for (size_t i = 0; i < n; i++) {
                if (i > 0) {
                    buf.append(',');
                }
                value(get(i));
            }
        }
        buf.append(']');
        return *this;
    }

    json_line & object(const char * name) { return open(name, '{'); }
    json_line & object()                  { separator(); buf.append('{'); need_comma = false; return *this; }
    json_line & close_object()            { buf.append('}'); need_comma = true; return *this; }

    json_line & array(const char * name)  { return open(name, '['); }
    json_line & inner_array()             { separator(); buf.append('['); need_comma = false; return *this; }
    json_line & close_array()             { buf.append(']'); need_comma = true; return *this; }

    template <typename T> json_line & kv_dynamic(const char * name, const T & v) {
        key(name);
        value(v);
        return *this;
    }

    // an array's next element
    template <typename T> json_line & item(const T & v) {
        separator();
        value(v);
        return *this;
    }

    // JSON that somebody else wrote
    json_line & kv_json(const char * name, const char * json) {
        key(name);
        // a line is a line: white space between tokens may be anything, so a space will do
        for (const char * c = json; *c; c++) {
            buf.append(*c == '\n' || *c == '\r' ? ' ' : *c);
        }
        return *this;
    }

  private:
    text_buffer buf;
    bool        need_comma = false;

    void raw(const char * s) { buf.append(s, strlen(s)); }

    void separator() {
        if (need_comma) {
            buf.append(',');
        }
        need_comma = true;
    }

    // of known length: the copy is a move or two
    template <size_t N> void literal_key(const char (&name)[N]) {
        char * const begin = buf.room(N + 3);
        char * out = begin;
        *out = ',';
        out += need_comma;
        need_comma = true;
        *out++ = '"';
        memcpy(out, name, N - 1);
        out[N - 1] = '"';
        out[N]     = ':';
        buf.advance((size_t) (out + N + 1 - begin));
    }

    void key(const char * name) {
        separator();
        buf.append('"');
        raw(name);
        buf.append("\":", 2);
    }

    json_line & open(const char * name, char bracket) {
        key(name);
        buf.append(bracket);
        need_comma = false;
        return *this;
    }

    template <typename T> void value(const T & v) {
        if constexpr (std::is_same_v<T, bool>) {
            raw(v ? "true" : "false");
        } else if constexpr (std::is_integral_v<T>) {
            integer(v);
        } else if constexpr (std::is_floating_point_v<T>) {
            number(v);
        } else {
            text(v);
        }
    }

    static constexpr size_t integer_chars = 21;  // of the longest 64-bit number and its sign

    // writes `v` at `out`, returns the end
    template <typename T> static char * format_integer(char * out, T v) {
        uint64_t u = (uint64_t) v;
        if constexpr (std::is_signed_v<T>) {
            if (v < 0) {
                *out++ = '-';
                u = 0 - u;
            }
        }
        return format_digits(out, u);
    }

    template <typename T> void integer(T v) {
        if (std::is_signed_v<T> && v < 0) {
            buf.append('-');
            digits(0 - (uint64_t) v);
        } else {
            digits((uint64_t) v);
        }
    }

    // one copy for all the fields of all the events: formatting a decode has to stay in the instruction cache
    __attribute__((noinline)) void digits(uint64_t u) {
        char * const begin = buf.room(integer_chars + 8);
        buf.advance((size_t) (format_digits(begin, u) - begin));
    }

    // the hot one: two columns for every kernel
    template <typename F> void integers(size_t n, F get) {
        char * const begin = buf.room(n * (integer_chars + 1) + 8);
        char * out = begin;
        for (size_t i = 0; i < n; i++) {
            if (i > 0) {
                *out++ = ',';
            }
            out = format_integer(out, get(i));
        }
        buf.advance((size_t) (out - begin));
    }

    void number(double v) {
        if (!std::isfinite(v)) {
            raw("null");
            return;
        }
        char digits[40];
        snprintf(digits, sizeof(digits), "%.9g", v);
        // the locale's decimal comma is not JSON's
        for (char * c = digits; *c; c++) {
            if (*c == ',') {
                *c = '.';
            }
        }
        raw(digits);
    }

    void text(const std::string & s) { text(s.data(), s.size()); }
    void text(const char * s)        { text(s ? s : "", s ? strlen(s) : 0); }

    void text(const char * s, size_t n) {
        buf.append('"');
        for (size_t i = 0; i < n;) {
            size_t plain = i;
            while (plain < n && is_plain((unsigned char) s[plain])) {
                plain++;
            }
            buf.append(s + i, plain - i);
            i = plain;
            if (i == n) {
                break;
            }
            const unsigned char c = (unsigned char) s[i];
            if (c < 0x80) {
                escape(c);
                i++;
            } else {
                const size_t len = utf8_length(s + i, n - i);
                if (len > 0) {
                    buf.append(s + i, len);
                    i += len;
                } else {
                    raw("\xEF\xBF\xBD");  // U+FFFD
                    i++;
                }
            }
        }
        buf.append('"');
    }

    static bool is_plain(unsigned char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; }

    void escape(unsigned char c) {
        char seq[8];
        snprintf(seq, sizeof(seq), c == '"' || c == '\\' ? "\\%c" : "\\u%04x", c);
        raw(seq);
    }

  public:
    // bytes of the valid UTF-8 sequence at `s`, 0 when there is none (RFC 3629: no surrogates, no overlong forms)
    static size_t utf8_length(const char * s, size_t n) {
        const unsigned char c = (unsigned char) s[0];
        const size_t len = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
        if (len == 0 || len > n) {
            return 0;
        }
        for (size_t i = 1; i < len; i++) {
            if (((unsigned char) s[i] & 0xc0) != 0x80) {
                return 0;
            }
        }
        const unsigned char d = len > 1 ? (unsigned char) s[1] : 0;
        const bool bad = (c == 0xe0 && d < 0xa0) || (c == 0xed && d > 0x9f) || (c == 0xf0 && d < 0x90) || (c == 0xf4 && d > 0x8f);
        return bad ? 0 : len;
    }

    static bool is_utf8(const std::string & s) {
        for (size_t i = 0; i < s.size();) {
            const size_t len = utf8_length(s.data() + i, s.size() - i);
            if (len == 0) {
                return false;
            }
            i += len;
        }
        return true;
    }

    static std::string hex(const std::string & bytes) {
        static const char digits[] = "0123456789abcdef";
        std::string out;
        for (const char c : bytes) {
            out += digits[(unsigned char) c >> 4];
            out += digits[(unsigned char) c & 15];
        }
        return out;
    }
};

}  // namespace llama_instr
