// What kernels find on the device: their indices, barriers, warp functions, atomics and arithmetic.
#pragma once

#include <cstdint>
#include <type_traits>

#pragma GCC visibility push(hidden)  // what runs blocks is in the same library: no detour through its table of symbols

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
// All kernels' shared memory. A function inside a namespace that declares it means another variable, which nobody has.
extern __align__(16) unsigned char prokl_shared[];

namespace host_cuda {

void block_barrier(const char* file, int line);

// Wait for the lanes of `mask`; `function` is what all of them have to call. Gives lane `source`'s value.
std::uint64_t exchange(const char* function, unsigned mask, std::uint64_t value, int source);

// As exchange, but bit i of what it gives says whether lane i's value is not 0.
unsigned vote(const char* function, unsigned mask, bool value);

inline int lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32; }

template <class To, class From>
To bits(From value) {
    static_assert(std::is_trivially_copyable_v<From> && std::is_trivially_copyable_v<To>);
    To to{};
    std::memcpy(&to, &value, sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
    return to;
}

template <class T>
T shuffle(const char* function, unsigned mask, T value, int source) {
    static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA shuffles words of 4 and 8 bytes");
    return bits<T>(exchange(function, mask, bits<std::uint64_t>(value), source));
}

}  // namespace host_cuda

#pragma GCC visibility pop

// The defaults name the line that calls, so that barriers in two branches are told apart.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    host_cuda::block_barrier(file, line);
}

inline void __syncwarp(unsigned mask = 0xffffffffu) { host_cuda::exchange("__syncwarp", mask, 0, host_cuda::lane()); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = host_cuda::lane();
    return host_cuda::shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = host_cuda::lane();
    const bool inside = (lane & (width - 1)) + delta < unsigned(width);
    return host_cuda::shuffle("__shfl_down_sync", mask, value, inside ? lane + int(delta) : lane);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = host_cuda::lane(), source = lane ^ bits;
    return host_cuda::shuffle("__shfl_xor_sync", mask, value, source <= (lane | (width - 1)) ? source : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return host_cuda::vote("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
    return host_cuda::vote("__any_sync", mask, predicate != 0) != 0;
}

// One thread runs at a time, so plain arithmetic is atomic.
template <class T>
T atomicMax(T* address, T value) {
    static_assert(std::is_integral_v<T> && sizeof(T) >= 4, "CUDA has atomicMax for integers only");
    const T old = *address;
    if (old < value) *address = value;
    return old;
}

inline unsigned __float_as_uint(float value) { return host_cuda::bits<unsigned>(value); }
inline int __float_as_int(float value) { return host_cuda::bits<int>(value); }
inline float __uint_as_float(unsigned value) { return host_cuda::bits<float>(value); }
inline float __int_as_float(int value) { return host_cuda::bits<float>(value); }
inline long long __double_as_longlong(double value) { return host_cuda::bits<long long>(value); }
inline double __longlong_as_double(long long value) { return host_cuda::bits<double>(value); }

inline float __fsqrt_rn(float value) { return sqrtf(value); }

// Templates, because newer C libraries declare functions of these names.
template <class T>
T rsqrt(T value) {
    return T(1) / sqrt(value);
}
template <class T>
float rsqrtf(T value) {
    return 1.0f / sqrtf(value);
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
