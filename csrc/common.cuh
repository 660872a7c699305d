// Shared by every kernel here: views of batches, the predicate that switches matrices off, launching.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

// A launch's shared memory; nothing here uses any other.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char prokl_shared[];
    return reinterpret_cast<T*>(prokl_shared);
}

namespace prokl {

using Index = long long;  // offsets into a batch exceed 32 bits

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Edge of the tile of a product that one thread keeps in registers. 16 x 16 threads make a block of it: 128 columns
// in float32 and 64 in float64, so that a block's square takes 64 or 32 KiB.
template <class T>
constexpr int EDGE = sizeof(T) == 4 ? 8 : 4;
template <class T>
constexpr int BLOCK = 16 * EDGE<T>;

// std::numeric_limits' functions are the host's.
template <class T>
constexpr T LARGEST = std::numeric_limits<T>::max();
template <class T>
constexpr T NORMAL = std::numeric_limits<T>::min();  // the smallest number with all digits
template <class T>
constexpr T QUIET_NAN = std::numeric_limits<T>::quiet_NaN();

// B row-major matrices: matrix b starts at data + b * stride, row i of it ld elements further than row i - 1.
template <class T>
struct Batch {
    T* data;
    Index stride;
    Index ld;

    __device__ __forceinline__ T* operator[](int b) const { return data + b * stride; }
    // The matrices that begin at (row, column) of these.
    Batch from(Index row, Index column) const { return {data + row * ld + column, stride, ld}; }
    template <class C, class = std::enable_if_t<std::is_same_v<C, const T> && !std::is_const_v<T>>>
    operator Batch<C>() const {
        return {data, stride, ld};
    }
};

// Matrices that are sums of `parts` others, so many elements apart: what a long product was split into.
template <class T>
struct Sum {
    Batch<const T> first;
    int parts;
    Index apart;

    __device__ __forceinline__ T at(int b, int i, int j) const {
        const T* element = first[b] + i * first.ld + j;
        T sum = *element;
        for (int part = 1; part < parts; ++part) sum += element[part * apart];
        return sum;
    }
};

// Bits of a matrix's status. prokl/backends/cuda_qr.py names them too.
enum QRStatus : int {
    SHIFTED = 2,      // N + shift I was factored in place of N
    RAISED = 4,       // a pass raised a pivot that was small beside its column
    HOUSEHOLDER = 8,  // by Householder's QR
    NONFINITE = 16,   // NaN or infinity in the matrix
    LOST = 32,        // N + shift I is not positive definite either: C is no root of it
};

// The matrices that a launch works on: those with such a bit, or all. The others' blocks return at once; nothing is read on
// the host.
struct Active {
    const int* status;
    int bit;

    __device__ __forceinline__ bool operator()(int b) const {
        return bit == 0 || (status != nullptr && (status[b] & bit) != 0);
    }
};

inline int ceil_div(Index a, Index b) { return static_cast<int>((a + b - 1) / b); }

inline void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}

// Bytes of shared memory that one block may have on the current device: 227 KiB on compute capability 9.0 and 10.0, 163
// on 8.0, 99 on 8.6, 8.9 and 12.0.
inline size_t shared_limit() {
    int device = 0, bytes = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
            Arguments... arguments) {
    if (shared > 48 * 1024)  // more than that is asked for kernel by kernel, always alike: a captured launch needs it too
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_limit())));
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// The binary exponent of a matrix's or a column's largest element; 0 where it is zero or not finite.
template <class T>
__device__ __forceinline__ int exponent_of(T largest) {
    int exponent = 0;
    if (largest > T(0) && largest <= LARGEST<T>) frexp(largest, &exponent);
    return exponent;
}

// 2^-exponent, as far as it is a number with all digits.
template <class T>
__device__ __forceinline__ T scale_down(int exponent) {
    constexpr int limit = std::numeric_limits<T>::max_exponent - 2;
    return ldexp(T(1), max(-limit, min(limit, -exponent)));
}

// Sum over a block of THREADS threads, the same in each of them; `scratch` holds WARPS elements.
template <class T>
__device__ T block_sum(T value, T* scratch) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    T sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += scratch[w];
    __syncthreads();  // before anybody uses scratch again
    return sum;
}

}  // namespace prokl
