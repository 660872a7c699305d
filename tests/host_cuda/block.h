// One block of threads: fibers that take turns at barriers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>

#include "cuda_runtime.h"

namespace host_cuda {

constexpr unsigned MOST_THREADS = 1024;

// What is read before it was written is NaN in float and in double, and -1 in int.
constexpr unsigned char UNWRITTEN = 0xff;

// What a GPU does in any order happens here in a shuffled one, or in order without random numbers.
using Random = std::optional<std::mt19937_64>;  // gives the same numbers wherever it runs

template <class Iterator>
void arrange(Iterator begin, Iterator end, Random& random) {
    if (!random) return;
    for (auto left = end - begin; left > 1; --left) std::iter_swap(begin + left - 1, begin + (*random)() % left);
}

// What a kernel did wrong in the current block.
std::runtime_error error(const std::string& what);

// Number the threads of blocks of blockDim.
void prepare_threads();

// Run thread(call) as every thread of block blockIdx. Throws what a thread throws, and where threads diverge.
void run_block(void (*thread)(void*), void* call, Random& random);

inline uint3 unravel(std::uint64_t index, dim3 size) {
    return {unsigned(index % size.x), unsigned(index / size.x % size.y), unsigned(index / size.x / size.y)};
}

}  // namespace host_cuda
