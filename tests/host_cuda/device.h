// What the kernels find on the device: their indices, barriers, the warps' shuffle, and arithmetic.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#pragma GCC visibility push(hidden)  // what runs blocks is in the same library: no detour through its table of symbols

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
// All kernels' shared memory. A function inside a namespace that declares it means another variable, which nobody has.
extern __align__(16) unsigned char prokl_shared[];

namespace host_cuda {

void block_barrier(const char* file, int line);

// Wait for the other lanes of the warp; gives lane `source`'s value.
std::uint64_t exchange(std::uint64_t value, int source);

inline int lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32; }

}  // namespace host_cuda

#pragma GCC visibility pop

// The defaults name the line that calls, so that barriers in two branches are told apart.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    host_cuda::block_barrier(file, line);
}

// Of whole warps, as all of the kernels' are.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA shuffles words of 4 and 8 bytes");
    if (mask != 0xffffffffu) throw std::runtime_error("The stand-in for CUDA shuffles whole warps alone.");
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    word = host_cuda::exchange(word, host_cuda::lane() ^ bits);
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// As CUDA's: a NaN loses against a number, and a signed integer beside an unsigned one is taken as unsigned.
template <class A, class B>
constexpr auto min(A a, B b) {
    using C = std::common_type_t<A, B>;
    const C left = static_cast<C>(a), right = static_cast<C>(b);
    return left != left || right < left ? right : left;
}
template <class A, class B>
constexpr auto max(A a, B b) {
    using C = std::common_type_t<A, B>;
    const C left = static_cast<C>(a), right = static_cast<C>(b);
    return left != left || right > left ? right : left;
}
