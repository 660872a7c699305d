// What every kernel here shares: views of batches, the predicate that switches matrices off, launching.
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

// What happened to a matrix, as bits of its state; passes are counted above them. prokl/cuda_qr.py names them too.
enum State : int {
    DONE = 1,
    SHIFTED = 2,      // V + delta U was factored in place of V, S + delta I in place of S
    RAISED = 4,       // a pivot of a Cholesky factorisation was small beside its column and raised
    HOUSEHOLDER = 8,  // the Cholesky passes did not end in orthonormal columns
    NONFINITE = 16,   // NaN or infinity in the matrix
    PASS = 256,       // one pass of Cholesky QR
};

// Which matrices a launch works on; the others' blocks return at once. Nothing is read on the host.
struct Active {
    const int* state;
    int mask;
    int wanted;

    __device__ __forceinline__ bool operator()(int b) const { return (state[b] & mask) == wanted; }
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
