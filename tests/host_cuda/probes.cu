// Kernels that tests/test_host_cuda.py proves the CPU's stand-in for CUDA with.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

template <class T>
__device__ T* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char prokl_shared[];
    return reinterpret_cast<T*>(prokl_shared);
}

namespace {

// SYNCHRONISED or not, turn a block's part of the data around through shared memory.
template <bool SYNCHRONISED>
__global__ void __launch_bounds__(1024) reverse_kernel(float* data) {
    float* shared = dynamic_shared<float>();
    float* mine = data + blockIdx.x * blockDim.x;
    shared[threadIdx.x] = mine[threadIdx.x];
    if (SYNCHRONISED) __syncthreads();
    mine[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// A barrier and a warp's sum in each of many rounds.
__global__ void rounds_kernel(int* out, int rounds) {
    int* shared = dynamic_shared<int>();
    int value = threadIdx.x;
    for (int round = 0; round < rounds; ++round) {
        shared[threadIdx.x] = value;
        __syncthreads();
        value = shared[(threadIdx.x + 1) % blockDim.x];
        __syncthreads();
    }
    out[threadIdx.x] = value;
}

__global__ void early_return_kernel() {
    if (threadIdx.x < 16) return;
    __syncthreads();
}

__global__ void two_barriers_kernel() {
    if (threadIdx.x < 16) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

__global__ void barrier_and_warp_kernel() {
    if (threadIdx.x % 2 == 0) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

__global__ void two_masks_kernel() { __syncwarp(threadIdx.x == 0 ? 0x3u : 0xfu); }

__global__ void two_functions_kernel(int* out) {
    out[threadIdx.x] = threadIdx.x == 0 ? __any_sync(~0u, 1) : int(__ballot_sync(~0u, 1));
}

__global__ void foreign_mask_kernel() { __syncwarp(0x1u); }

template <class T>
__global__ void warp_kernel(T* out) {
    const T mine = T(threadIdx.x);
    T down = mine, across = mine;
    for (int offset = 16; offset > 0; offset /= 2) {
        down += __shfl_down_sync(~0u, down, offset);
        across += __shfl_xor_sync(~0u, across, offset);
    }
    T* row = out + threadIdx.x * 5;
    row[0] = down;
    row[1] = across;
    row[2] = __shfl_sync(~0u, mine, 3);
    row[3] = __shfl_sync(~0u, mine, 1, 8);
    row[4] = __shfl_down_sync(~0u, mine, 2, 8);
}

__global__ void vote_kernel(unsigned* out) {
    const unsigned lane = threadIdx.x % 32;
    out[threadIdx.x * 3] = __ballot_sync(~0u, lane % 3 == 0);
    out[threadIdx.x * 3 + 1] = __any_sync(~0u, threadIdx.x == 40);
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;  // halves that do not wait for each other
    out[threadIdx.x * 3 + 2] = lane < 16 ? __ballot_sync(half, 1) : __ballot_sync(half, lane == 31);
}

// Lanes that have returned are not waited for, and what is asked of them is undefined.
__global__ void returned_lanes_kernel(float* out) {
    if (threadIdx.x % 2 == 1) return;
    out[threadIdx.x] = __shfl_sync(~0u, 1.0f, threadIdx.x < 16 ? 0 : 1);
}

template <class T>
__global__ void unwritten_kernel(T* out, int offset) {
    out[threadIdx.x] = dynamic_shared<T>()[threadIdx.x + offset];
}

__global__ void overrun_kernel(int byte, int at_block) {
    if (int(blockIdx.x) == at_block && threadIdx.x == 0) dynamic_shared<unsigned char>()[byte] = 1;
}

__global__ void nothing_kernel() {}
__global__ void large_kernel() {}

// Row i: what the thread that is i-th of the whole grid sees.
__global__ void visit_kernel(int* out) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int* row = out + (block * int(blockDim.x * blockDim.y * blockDim.z) + thread) * 7;
    const int seen[] = {int(blockIdx.x),  int(blockIdx.y),  int(blockIdx.z), int(threadIdx.x),
                        int(threadIdx.y), int(threadIdx.z), row[6] + 1};
    for (int i = 0; i < 7; ++i) row[i] = seen[i];
}

__global__ void maximum_kernel(int* largest, unsigned* largest_bits, int* seen) {
    const int value = int(blockIdx.x * 37 % 64) - 100;
    seen[blockIdx.x] = atomicMax(largest, value);
    atomicMax(largest_bits, __float_as_uint(float(blockIdx.x * 37 % 64)));
}

// Whoever comes next takes the next line.
__global__ void sequence_kernel(int* count, int* blocks, int* threads) {
    const int place = (*count)++;
    blocks[place] = blockIdx.x;
    threads[place] = threadIdx.x;
}

__global__ void arithmetic_kernel(float* out) {
    const float nan = __int_as_float(0x7fc00000);
    const float results[] = {min(nan, 1.0f), min(1.0f, nan),  max(nan, 1.0f),     max(1.0f, nan),   float(min(-1, 1u)),
                             rsqrt(4.0f),    rsqrtf(16.0f), float(rsqrt(64.0)), __fsqrt_rn(2.0f)};
    for (int i = 0; i < 9; ++i) out[i] = results[i];
}

// Only the CPU's threads can.
__global__ void throw_kernel() {
    if (threadIdx.x == 5) throw std::logic_error("thrown by thread 5");
    __syncthreads();
}

template <class... Parameters, class... Arguments>
const char* run(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    static std::string said;
    try {
        said = cudaGetErrorString(cudaLaunchKernelEx(&config, kernel, arguments...));
    } catch (const std::exception& error) {
        said = error.what();
    }
    return said.c_str();
}

}  // namespace

// Each gives what the launch said, "no error" if all went well.
extern "C" {
#pragma GCC visibility push(default)

const char* reverse(float* data, int blocks, int threads, int synchronised) {
    return run(synchronised ? reverse_kernel<true> : reverse_kernel<false>, blocks, threads, threads * sizeof(float),
               data);
}
const char* rounds(int* out, int threads, int count) {
    return run(rounds_kernel, 1, threads, threads * sizeof(int), out, count);
}
const char* early_return() { return run(early_return_kernel, dim3(1, 2), 48, 0); }
const char* two_barriers() { return run(two_barriers_kernel, 1, 48, 0); }
const char* barrier_and_warp() { return run(barrier_and_warp_kernel, 1, 32, 0); }
const char* two_masks() { return run(two_masks_kernel, 1, 2, 0); }
const char* two_functions(int* out) { return run(two_functions_kernel, 1, 32, 0, out); }
const char* foreign_mask() { return run(foreign_mask_kernel, 1, 2, 0); }
const char* warp_float(float* out, int threads) { return run(warp_kernel<float>, 1, threads, 0, out); }
const char* warp_double(double* out, int threads) { return run(warp_kernel<double>, 1, threads, 0, out); }
const char* warp_int(int* out, int threads) { return run(warp_kernel<int>, 1, threads, 0, out); }
const char* vote(unsigned* out, int threads) { return run(vote_kernel, 1, threads, 0, out); }
const char* returned_lanes(float* out) { return run(returned_lanes_kernel, 1, 32, 0, out); }
const char* unwritten_float(float* out, int shared, int offset) {
    return run(unwritten_kernel<float>, 1, 32, shared, out, offset);
}
const char* unwritten_double(double* out, int shared, int offset) {
    return run(unwritten_kernel<double>, 1, 32, shared, out, offset);
}
const char* overrun(int shared, int byte, int at_block) {
    cudaFuncSetAttribute(overrun_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    return run(overrun_kernel, 4, 32, shared, byte, at_block);
}
const char* nothing(const unsigned* grid, const unsigned* block, int shared) {
    return run(nothing_kernel, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), shared);
}
const char* allow(int bytes) {
    return cudaGetErrorString(cudaFuncSetAttribute(large_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
const char* large(int shared) { return run(large_kernel, 1, 32, shared); }
const char* visit(int* out, const unsigned* grid, const unsigned* block) {
    return run(visit_kernel, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), 0, out);
}
const char* maximum(int* largest, unsigned* largest_bits, int* seen) {
    return run(maximum_kernel, 64, 1, 0, largest, largest_bits, seen);
}
const char* sequence(int* count, int* blocks, int* threads, int grid, int block) {
    return run(sequence_kernel, grid, block, 0, count, blocks, threads);
}
const char* throwing() { return run(throw_kernel, 1, 64, 0); }
const char* clear(void* data, int value, int bytes) { return cudaGetErrorString(cudaMemsetAsync(data, value, bytes)); }
const char* arithmetic(float* out) { return run(arithmetic_kernel, 1, 1, 0, out); }

#pragma GCC visibility pop
}
