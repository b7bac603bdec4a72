# Sourced by bash in the root of the repository: how llama.cpp is compiled. What localrag does not use of llama-cpp-python's build is left
# out (pictures, llama.cpp's own programs). Where the processor has AMX tiles, they are not used: GCC 12 compiles llama.cpp's set-up of
# them away, and the first prompt dies of an illegal instruction.
llama_flags=
if grep -qw amx_tile /proc/cpuinfo 2>/dev/null; then llama_flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"; fi
export CMAKE_ARGS="${CMAKE_ARGS:-} -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=$PWD/scripts/llama.cmake"
export CFLAGS="${CFLAGS:-} $llama_flags" CXXFLAGS="${CXXFLAGS:-} $llama_flags"
