# A build with a sanitizer optimizes the kernels, in which its programs spend their time. The rest compiles in half the
# time without.
foreach (language C CXX)
    set(CMAKE_${language}_FLAGS_RELEASE "-O1 -DNDEBUG")
endforeach()
