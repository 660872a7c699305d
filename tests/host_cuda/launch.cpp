#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "block.h"

namespace {

constexpr size_t GUARD = 4096;  // bytes of canary behind the largest launch's shared memory

}  // namespace

alignas(16) unsigned char prokl_shared[host_cuda::SHARED_LIMIT + GUARD];

namespace host_cuda {
namespace {

std::mutex one_launch_at_a_time;
size_t smaller_limit = 0;
unsigned long long launches = 0;  // since the library was loaded
std::map<const void*, size_t> allowed;  // bytes of shared memory that kernels may have
Random random_numbers;

const std::vector<unsigned char> canary(sizeof prokl_shared, UNWRITTEN);

void check_canary(size_t shared) {
    if (std::memcmp(canary.data(), prokl_shared + shared, canary.size() - shared) != 0) {
        throw error("Shared memory was written beyond dynamicSmemBytes=" + std::to_string(shared));
    }
}

bool valid(dim3 grid, dim3 block) {
    const std::uint64_t threads = std::uint64_t(block.x) * block.y * block.z;
    const auto within = [](unsigned value, unsigned most) { return 1 <= value && value <= most; };
    return within(grid.x, 0x7fffffff) && within(grid.y, 65535) && within(grid.z, 65535) && within(block.z, 64) &&
           1 <= threads && threads <= MOST_THREADS;
}

std::vector<std::uint64_t> blocks_in_order() {
    std::vector<std::uint64_t> blocks(std::uint64_t(gridDim.x) * gridDim.y * gridDim.z);
    std::iota(blocks.begin(), blocks.end(), 0);
    arrange(blocks.begin(), blocks.end(), random_numbers);
    return blocks;
}

}  // namespace

size_t shared_limit() { return smaller_limit == 0 ? SHARED_LIMIT : smaller_limit; }

cudaError_t allow_shared(const void* kernel, int bytes) {
    if (bytes < 0 || size_t(bytes) > shared_limit()) return cudaErrorInvalidValue;
    const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    allowed[kernel] = bytes;
    return cudaSuccess;
}

cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, void (*thread)(void*), void* call) {
    const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    if (!valid(config.gridDim, config.blockDim)) return cudaErrorInvalidConfiguration;
    const size_t shared = config.dynamicSmemBytes, asked = allowed.count(kernel) ? allowed[kernel] : 0;
    if (shared > std::max(asked, SHARED_UNASKED) || config.numAttrs != 0) return cudaErrorInvalidValue;
    ++launches;

    gridDim = config.gridDim;
    blockDim = config.blockDim;
    prepare_threads();
    for (const std::uint64_t block : blocks_in_order()) {
        blockIdx = unravel(block, gridDim);
        std::memset(prokl_shared, UNWRITTEN, sizeof prokl_shared);
        run_block(thread, call, random_numbers);
        check_canary(shared);
    }
    return cudaSuccess;
}

}  // namespace host_cuda

unsigned long long host_cuda_launches() { return host_cuda::launches; }

void host_cuda_shuffle(unsigned long long seed) {
    using namespace host_cuda;
    const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    random_numbers.reset();
    if (seed != 0) random_numbers.emplace(seed);
}

void host_cuda_shared_limit(size_t bytes) {
    using namespace host_cuda;
    const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    smaller_limit = std::min(bytes, SHARED_LIMIT);
    allowed.clear();  // another device
}
