# Included by llama-cpp-python's CMake project: its helper library for command-line programs is not used, and takes a minute to compile.
set(LLAMA_BUILD_COMMON OFF)
