// Kernels that tests/test_host_cuda.py shows with what the CPU's stand-in for CUDA finds.
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

__global__ void two_masks_kernel() { __syncwarp(threadIdx.x == 0 ? 0x3u : 0xfu); }

__global__ void overrun_kernel(int byte, int at_block) {
    if (int(blockIdx.x) == at_block && threadIdx.x == 0) dynamic_shared<unsigned char>()[byte] = 1;
}

__global__ void nothing_kernel() {}

// Whoever comes next takes the next line.
__global__ void sequence_kernel(int* count, int* blocks, int* threads) {
    const int place = (*count)++;
    blocks[place] = blockIdx.x;
    threads[place] = threadIdx.x;
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
const char* early_return() { return run(early_return_kernel, dim3(1, 2), 48, 0); }
const char* two_barriers() { return run(two_barriers_kernel, 1, 48, 0); }
const char* two_masks() { return run(two_masks_kernel, 1, 2, 0); }
const char* overrun(int shared, int byte, int at_block) { return run(overrun_kernel, 4, 32, shared, byte, at_block); }
const char* nothing(int grid, int block, int shared) { return run(nothing_kernel, grid, block, shared); }
const char* sequence(int* count, int* blocks, int* threads, int grid, int block) {
    return run(sequence_kernel, grid, block, 0, count, blocks, threads);
}

#pragma GCC visibility pop
}
