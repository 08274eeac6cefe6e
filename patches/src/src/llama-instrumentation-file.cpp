// llama-instrumentation-file.cpp - see the header for the rule that it keeps

#include "llama-instrumentation-file.h"

#include "llama-instrumentation-schema.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <poll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <unistd.h>

namespace llama_instr {

namespace {

// O_APPEND: what is written after the file was cut, or opened again, goes to its end. A mapping needs to read.
constexpr int write_flags = O_APPEND | O_CLOEXEC;
constexpr size_t pinned_bytes = 1;

// with its links resolved, so that a log that replaces another does not replace a link to it
std::string resolved(const char * path) {
    char buffer[PATH_MAX];
    if (realpath(path, buffer)) {
        return buffer;
    }
    const std::string name = path;
    return name[0] != '/' && getcwd(buffer, sizeof(buffer)) ? std::string(buffer) + "/" + name : name;
}

// Opens a pipe or a device, -1 with errno set. A named pipe without a reader gets a second to find one.
int open_for_writing(const char * path) {
    int opened = -1;
    for (int tries = 0; tries < 100; tries++) {
        opened = ::open(path, O_WRONLY | O_NONBLOCK | write_flags);
        if (opened >= 0 || errno != ENXIO) {
            break;
        }
        usleep(10 * 1000);
    }
    if (opened >= 0) {
        (void) fcntl(opened, F_SETFL, O_APPEND);  // only the writer's thread waits for the reader
    }
    return opened;
}

// an empty file is a log that lost its events
bool begins_as_log(int descriptor) {
    static const char beginning[] = LLAMA_INSTR_FIRST_BYTES;
    char head[sizeof(beginning) - 1];
    const ssize_t n = pread(descriptor, head, sizeof(head), 0);
    return n >= 0 && memcmp(head, beginning, (size_t) n) == 0;
}

}  // namespace

int held_file::create(const char * path, const existing & found) {
    struct stat st;
    const bool exists = stat(path, &st) == 0;
    if (exists && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) {
        return keep(open_for_writing(path));
    }
    name = resolved(path);
    if (exists && found.replace) {
        return open_replacement(found);
    }
    return keep(::open(path, O_RDWR | write_flags | O_CREAT | O_EXCL, 0600));
}

// Locks the file until commit(), so that processes that replace the same file do so one after the other.
int held_file::open_replacement(const existing & found) {
    struct stat locked, now;
    do {
        if (replaced >= 0) {
            ::close(replaced);  // another process replaced it before this one had the lock
        }
        replaced = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
        if (replaced < 0) {
            return -errno;
        }
        (void) flock(replaced, LOCK_EX);
        if (fstat(replaced, &locked) != 0 || stat(name.c_str(), &now) != 0) {
            return -errno;
        }
        if (found.dev != 0 && (now.st_dev != found.dev || now.st_ino != found.ino)) {
            return -EEXIST;
        }
    } while (locked.st_dev != now.st_dev || locked.st_ino != now.st_ino);
    if (!begins_as_log(replaced)) {
        return -EBADMSG;
    }
    temporary = name.substr(0, name.find_last_of('/')) + "/.instr-XXXXXX";
    const int opened = mkostemp(temporary.data(), write_flags);
    if (opened < 0) {
        temporary.clear();
    }
    return keep(opened);
}

int held_file::keep(int opened) {
    struct stat st;
    if (opened < 0 || fstat(opened, &st) != 0) {
        return -errno;
    }
    held    = true;
    fd      = opened;
    regular = S_ISREG(st.st_mode);
    dev     = st.st_dev;
    ino     = st.st_ino;
    if (regular) {
        pin = mmap(nullptr, pinned_bytes, PROT_NONE, MAP_SHARED, fd, 0);
    }
    return 0;
}

int held_file::commit() {
    int status = 0;
    if (!temporary.empty()) {
        status = rename(temporary.c_str(), name.c_str()) == 0 ? 0 : -errno;
        if (status == 0) {
            temporary.clear();
        }
    }
    if (replaced >= 0) {
        ::close(replaced);
        replaced = -1;
    }
    return status;
}

void held_file::discard() {
    if (held && regular) {
        ::unlink(temporary.empty() ? name.c_str() : temporary.c_str());
    }
    temporary.clear();
    close();
}

void held_file::duplicate(int descriptor) {
    close();
    // a high number: programs expect the lowest ones for what they open first
    keep(fcntl(descriptor, F_DUPFD_CLOEXEC, 64));
}

int held_file::get() {
    if (fd >= 0 && is_own(fd)) {
        return fd;
    }
    fd = -1;  // the number belongs to the application now, or is unused
    if (!held || !regular || name.empty()) {
        errno = EBADF;
        return -1;
    }
    const int opened = ::open((temporary.empty() ? name : temporary).c_str(), O_RDWR | write_flags);
    if (opened >= 0 && !is_own(opened)) {
        ::close(opened);
        errno = ENOENT;
        return -1;
    }
    return fd = opened;
}

int held_file::close() {
    if (replaced >= 0) {
        ::close(replaced);
        replaced = -1;
    }
    const bool owned = fd >= 0 && is_own(fd);
    const int  status = owned && ::close(fd) != 0 ? -errno : 0;
    if (pin && pin != MAP_FAILED) {
        munmap(pin, pinned_bytes);
    }
    pin  = nullptr;
    held = false;
    fd   = -1;
    return status;
}

bool held_file::is_own(int descriptor) const {
    struct stat st;
    return fstat(descriptor, &st) == 0 && st.st_dev == dev && st.st_ino == ino;
}

//
// the names of a log's files
//

std::string before_suffix(const std::string & path, const std::string & text) {
    const size_t slash = path.find_last_of('/');
    const size_t dot   = path.find_last_of('.');
    const bool   has_suffix = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1);
    const size_t at = has_suffix ? dot : path.size();
    return path.substr(0, at) + "." + text + path.substr(at);
}

// removes the file, if it begins as a log
static void remove_log(const char * path) {
    struct stat st;
    const int file = stat(path, &st) == 0 && S_ISREG(st.st_mode) ? ::open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0 && begins_as_log(file)) {
        ::unlink(path);
    }
    if (file >= 0) {
        ::close(file);
    }
}

void remove_parts(const std::string & path) {
    const size_t at = before_suffix(path, "part*").find_last_of('*');  // of a part's number in its name
    const std::filesystem::path directory = std::filesystem::path(path).parent_path();
    std::error_code error;
    for (const auto & entry : std::filesystem::directory_iterator(directory.empty() ? "." : directory, error)) {
        const std::string   name   = (directory / entry.path().filename()).string();
        const unsigned long number = name.size() > at ? strtoul(&name[at], nullptr, 10) : 0;
        if (number > 1 && name == before_suffix(path, "part" + std::to_string(number))) {
            remove_log(name.c_str());
        }
    }
}

//
// standard error
//

namespace {

// never destroyed, like the recorder's globals
struct message_state {
    std::mutex mutex;
    held_file  standard_error;
};

message_state & messages() {
    static message_state * state = new message_state;
    return *state;
}

// whether it takes something within a tenth of a second
bool takes_text(int descriptor) {
#ifdef __APPLE__
    // poll(2) there: "does not support devices", and so no terminal
    if (descriptor >= FD_SETSIZE) {
        return false;
    }
    fd_set  set;
    timeval patience = { 0, 100 * 1000 };
    FD_ZERO(&set);
    FD_SET(descriptor, &set);
    return select(descriptor + 1, nullptr, &set, nullptr, &patience) > 0;
#else
    pollfd to = { descriptor, POLLOUT, 0 };
    return poll(&to, 1, 100) > 0 && to.revents == POLLOUT;
#endif
}

}  // namespace

std::mutex & messages_mutex() {
    return messages().mutex;
}

void keep_standard_error() {
    auto & m = messages();
    std::lock_guard<std::mutex> lock(m.mutex);
    m.standard_error.duplicate(STDERR_FILENO);
}

void tell(const std::string & text) {
    auto & m = messages();
    const std::string line = "llama-instr: " + text + "\n";
    std::lock_guard<std::mutex> lock(m.mutex);
    const int kept = m.standard_error.get();
    const int to   = kept >= 0 ? kept : STDERR_FILENO;
    // no thread waits for a terminal or a pipe that takes nothing; one that is ready takes so much at once
    if (takes_text(to)) {
        (void) !::write(to, line.data(), std::min(line.size(), (size_t) PIPE_BUF));
    }
}

std::string reason_of(int status) {
    switch (-status) {
        case EBADMSG:   return "exists and is not a log, so it is not overwritten";
        case ENXIO:     return "nothing reads it";
        case ETIMEDOUT: return "the disk or the reader of the pipe has stalled";
        default:        return strerror(-status);
    }
}

}  // namespace llama_instr
