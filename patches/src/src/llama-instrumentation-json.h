// llama-instrumentation-json.h - builds one NDJSON line: numbers and keys appended to a reused buffer
//
// A line is formatted in the thread that measured, outside every timed region, and handed to the log
// whole. The text of a model, a path or a message may hold anything: it always ends as valid JSON.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>

namespace llama_instr {

class json_line {
  public:
    // every line begins with its event and its time
    json_line & begin(const char * event, uint64_t t) {
        buf.clear();
        need_comma = false;
        raw("{\"event\":\"");
        raw(event);
        raw("\",\"t\":");
        integer(t);
        need_comma = true;
        return *this;
    }

    // closes the line; the text is valid until the next begin()
    const std::string & end() {
        raw("}\n");
        return buf;
    }

    // a bare array instead of a line
    json_line & begin_array() {
        buf = '[';
        need_comma = false;
        return *this;
    }

    const std::string & end_array() {
        buf += ']';
        return buf;
    }

    // keys are literals
    template <size_t N, typename T> json_line & kv(const char (&name)[N], const T & v) {
        key(name, N - 1);
        value(v);
        return *this;
    }

    // a column of numbers, taken from `n` items by `get`
    template <size_t N, typename F> json_line & column(const char (&name)[N], size_t n, F get) {
        key(name, N - 1);
        buf += '[';
        if constexpr (std::is_integral_v<decltype(get((size_t) 0))>) {
            integers(n, get);
        } else {
            for (size_t i = 0; i < n; i++) {
                if (i > 0) {
                    buf += ',';
                }
                value(get(i));
            }
        }
        buf += ']';
        return *this;
    }

    json_line & object(const char * name) { return open(name, '{'); }
    json_line & object()                  { separator(); buf += '{'; need_comma = false; return *this; }
    json_line & close_object()            { buf += '}'; need_comma = true; return *this; }

    json_line & array(const char * name)  { return open(name, '['); }
    json_line & inner_array()             { separator(); buf += '['; need_comma = false; return *this; }
    json_line & close_array()             { buf += ']'; need_comma = true; return *this; }

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
            buf += *c == '\n' || *c == '\r' ? ' ' : *c;
        }
        return *this;
    }

  private:
    std::string buf;
    bool        need_comma = false;

    void raw(const char * s) { buf.append(s, strlen(s)); }

    void separator() {
        if (need_comma) {
            buf += ',';
        }
        need_comma = true;
    }

    void key(const char * name, size_t length) {
        char text[64];
        char * out = text;
        if (need_comma) {
            *out++ = ',';
        }
        need_comma = true;
        *out++ = '"';
        length = length < sizeof(text) - 4 ? length : sizeof(text) - 4;
        memcpy(out, name, length);
        out += length;
        *out++ = '"';
        *out++ = ':';
        buf.append(text, (size_t) (out - text));
    }

    void key(const char * name) { key(name, strlen(name)); }

    json_line & open(const char * name, char bracket) {
        key(name);
        buf += bracket;
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

    static constexpr size_t integer_chars = 20;  // of the longest 64-bit number, sign included

    static size_t count_digits(uint64_t u) {
        size_t n = 1;
        for (;; u /= 10000, n += 4) {
            if (u < 10)    { return n; }
            if (u < 100)   { return n + 1; }
            if (u < 1000)  { return n + 2; }
            if (u < 10000) { return n + 3; }
        }
    }

    // writes `v` at `out`, returns the end
    template <typename T> static char * format_integer(char * out, T v) {
        static const char pairs[] =
            "00010203040506070809101112131415161718192021222324252627282930313233343536373839"
            "40414243444546474849505152535455565758596061626364656667686970717273747576777879"
            "8081828384858687888990919293949596979899";
        uint64_t u = (uint64_t) v;
        if constexpr (std::is_signed_v<T>) {
            if (v < 0) {
                *out++ = '-';
                u = 0 - u;
            }
        }
        char * const end = out + count_digits(u);
        char * at = end;
        for (; u >= 100; u /= 100) {
            at -= 2;
            memcpy(at, pairs + 2 * (u % 100), 2);
        }
        if (u >= 10) {
            memcpy(at - 2, pairs + 2 * u, 2);
        } else {
            at[-1] = (char) ('0' + u);
        }
        return end;
    }

    template <typename T> void integer(T v) {
        char digits[integer_chars];
        buf.append(digits, (size_t) (format_integer(digits, v) - digits));
    }

    // the hot one: two columns for every kernel
    template <typename F> void integers(size_t n, F get) {
        const size_t begin = buf.size();
        buf.resize(begin + n * (integer_chars + 1));
        char * out = &buf[begin];
        for (size_t i = 0; i < n; i++) {
            if (i > 0) {
                *out++ = ',';
            }
            out = format_integer(out, get(i));
        }
        buf.resize((size_t) (out - buf.data()));
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
        buf += '"';
        for (size_t i = 0; i < n;) {
            const unsigned char c = (unsigned char) s[i];
            if (c < 0x20 || c == '"' || c == '\\' || c == 0x7f) {
                escape(c);
                i++;
            } else if (c < 0x80) {
                buf += (char) c;
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
        buf += '"';
    }

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
