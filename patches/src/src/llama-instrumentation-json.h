// llama-instrumentation-json.h - builds NDJSON lines: numbers and keys appended to a reused buffer
//
// Formats outside every timed region. The text of a model, a path or a message may hold any bytes; the line is
// valid JSON in any case.

#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace [[gnu::visibility("hidden")]] llama_instr {

class json_line {
  public:
    // begins a line with its event and its time; forgets what was there
    json_line & begin(const char * event, uint64_t t) {
        buf.clear();
        return begin_next(event, t);
    }

    // the same, after the lines that were ended before
    json_line & begin_next(const char * event, uint64_t t) {
        const std::string_view name = event;
        char * to = grow(name.size() + 16 + most_digits);
        to = put(put(put(to, "{\"event\":\""), name), "\",\"t\":");
        cut(std::to_chars(to, to + most_digits, t).ptr);
        need_comma = true;
        return *this;
    }

    // closes the line; returns all lines, valid until the next begin()
    std::string_view end() {
        raw("}\n");
        return buf;
    }

    void append(std::string_view whole_lines) { buf.append(whole_lines); }
    void clear() { buf.clear(); }
    std::string_view lines() const { return buf; }

    template <typename T> json_line & kv(const char * name, const T & v) {
        if constexpr (is_number<T>) {
            char * to = key(name, most_digits);
            cut(std::to_chars(to, to + most_digits, v).ptr);
        } else {
            cut(key(name, 0));
            value(v);
        }
        return *this;
    }

    // the same, of a number that is -1 if it is absent
    template <typename T> json_line & kv_if_known(const char * name, T v) { return v >= 0 ? kv(name, v) : *this; }

    // a column taken from `n` items by `get`
    template <typename F> json_line & column(const char * name, size_t n, F get) {
        array(name);
        if constexpr (is_number<decltype(get(n))>) {
            integers(n, get);
        } else {
            for (size_t i = 0; i < n; i++) {
                item(get(i));
            }
        }
        return close_array();
    }

    json_line & object(const char * name) { return open(name, '{'); }
    json_line & object()                  { separator(); buf.push_back('{'); need_comma = false; return *this; }
    json_line & close_object()            { buf.push_back('}'); need_comma = true; return *this; }

    json_line & array(const char * name)  { return open(name, '['); }
    json_line & inner_array()             { separator(); buf.push_back('['); need_comma = false; return *this; }
    json_line & close_array()             { buf.push_back(']'); need_comma = true; return *this; }

    // an array's next element
    template <typename T> json_line & item(const T & v) {
        separator();
        value(v);
        return *this;
    }

    // the same, of JSON
    json_line & item_json(const std::string & json) {
        separator();
        buf.append(json);
        return *this;
    }

    // JSON from elsewhere
    json_line & kv_json(const char * name, const char * json) {
        cut(key(name, 0));
        // keep it on one line: a line break in JSON is white space, which a space may replace
        for (const char * c = json; *c; c++) {
            buf.push_back(*c == '\n' || *c == '\r' ? ' ' : *c);
        }
        return *this;
    }

  private:
    template <typename T> static constexpr bool is_number = std::is_integral_v<T> && !std::is_same_v<T, bool>;

    static constexpr size_t most_digits = 20;  // of a 64-bit number, or of its sign and digits

    std::string buf;
    bool        need_comma = false;

    void raw(const char * s) { buf.append(s); }

    void separator() {
        if (need_comma) {
            buf.push_back(',');
        }
        need_comma = true;
    }

    // the rest of the line is written through a pointer, and cut where that ends: a call per piece would cost more
    // than the piece
    char * grow(size_t n) {
        const size_t size = buf.size();
        buf.resize(size + n);
        return &buf[size];
    }

    void cut(const char * end) { buf.resize((size_t) (end - buf.data())); }

    static char * put(char * to, std::string_view s) {
        memcpy(to, s.data(), s.size());
        return to + s.size();
    }

    // returns where the value begins, with room for `n` bytes of it
    char * key(std::string_view name, size_t n) {
        char * to = grow(name.size() + 4 + n);
        if (need_comma) {
            *to++ = ',';
        }
        need_comma = true;
        *to++ = '"';
        return put(put(to, name), "\":");
    }

    json_line & open(const char * name, char bracket) {
        cut(key(name, 0));
        buf.push_back(bracket);
        need_comma = false;
        return *this;
    }

    template <typename T> void value(const T & v) {
        if constexpr (std::is_same_v<T, bool>) {
            raw(v ? "true" : "false");
        } else if constexpr (std::is_integral_v<T>) {
            char * to = grow(most_digits);
            cut(std::to_chars(to, to + most_digits, v).ptr);
        } else if constexpr (std::is_floating_point_v<T>) {
            number(v);
        } else {
            text(v);
        }
    }

    // written in place: these are most of a log
    template <typename F> void integers(size_t n, F get) {
        char * to = grow(n * (most_digits + 1));
        for (size_t i = 0; i < n; i++) {
            if (i > 0) {
                *to++ = ',';
            }
            to = std::to_chars(to, to + most_digits, get(i)).ptr;
        }
        cut(to);
    }

    void number(double v) {
        if (!std::isfinite(v)) {
            raw("null");
            return;
        }
        char digits[40];
        snprintf(digits, sizeof(digits), "%.9g", v);
        // some locales write a decimal comma
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
        buf.push_back('"');
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
        buf.push_back('"');
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

// the calling thread's line; only one is built at a time
inline json_line & line_buffer() {
    thread_local json_line line;
    return line;
}

}  // namespace llama_instr
