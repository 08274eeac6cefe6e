// llama-instrumentation-file.h - files that the recorder keeps open in a program that is not its own: logs, and standard
// error
//
// An application may close descriptors that it did not open, as daemons do, and then open its own files under
// the same numbers. So before each write and close, the descriptor is compared with the file that was opened.

#pragma once

#include <mutex>
#include <string>
#include <sys/types.h>

namespace [[gnu::visibility("hidden")]] llama_instr {

class held_file {
  public:
    held_file() = default;
    held_file(const held_file &) = delete;
    held_file & operator=(const held_file &) = delete;
    ~held_file() { close(); }

    // What may be at `path` when a log is created there.
    struct existing {
        bool  replace = false;  // commit() replaces a log that is there
        dev_t dev = 0;          // not 0: only this very file
        ino_t ino = 0;
    };

    // Creates a log that only its owner may read. Returns 0 or -errno: -EEXIST when a file is in the way, and
    // -EBADMSG when the file to replace does not begin as a log. What is not a regular file, such as a pipe, is
    // opened as it is.
    int create(const char * path, const existing & found);

    // Gives the new file its name, in place of the one that it replaces. Returns 0 or -errno.
    int commit();

    // Removes what create() made.
    void discard();

    // holds what `descriptor` is open on
    void duplicate(int descriptor);

    // The descriptor, or -1 with errno set. A regular file whose descriptor the application has closed is
    // opened again.
    int get();

    // returns 0 or -errno
    int close();

    // true until close(), also after the application has closed the descriptor
    bool is_open()    const { return held; }
    bool is_regular() const { return regular; }

  private:
    bool  held    = false;
    int   fd      = -1;
    bool  regular = false;
    dev_t dev     = 0;
    ino_t ino     = 0;
    void * pin    = nullptr;  // a mapping: while there is one, no other file gets this inode
    std::string name;       // absolute
    std::string temporary;  // its name until commit()
    int   replaced = -1;    // the file that is replaced, locked until then

    int  open_replacement(const existing & found);
    int  keep(int opened);
    bool is_own(int descriptor) const;
};

// session.log, part2 -> session.part2.log
std::string before_suffix(const std::string & path, const std::string & text);
// removes the later parts of the recording whose log `path` was, logs only
void remove_parts(const std::string & path);

// keeps standard error as it is now, before a library redirects it, as llama-cpp-python does
void keep_standard_error();
// prints a line to it, unless that is held up
void tell(const std::string & text);
// a -errno in words
std::string reason_of(int status);
// guards the copy of standard error
std::mutex & messages_mutex();

}  // namespace llama_instr
