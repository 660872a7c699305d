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

constexpr std::uint32_t CANARY = 0x7ff5a5a5;  // NaN in float and in double

std::mutex one_launch_at_a_time;
size_t smaller_limit = 0;
unsigned long long* counter = nullptr;  // of launches; nothing runs while it is there
std::map<const void*, size_t> allowed;  // bytes of shared memory that kernels may have
Order thread_order = Order::FORWARD, block_order = Order::FORWARD;
Random random_numbers(0);

const std::vector<unsigned char>& canary() {
    static const std::vector<unsigned char> bytes = [] {
        std::vector<unsigned char> filled(sizeof prokl_shared);
        for (size_t at = 0; at < filled.size(); at += sizeof CANARY) std::memcpy(&filled[at], &CANARY, sizeof CANARY);
        return filled;
    }();
    return bytes;
}

void write_canary(size_t shared) {
    std::memcpy(prokl_shared + shared, canary().data() + shared, canary().size() - shared);
}

void check_canary(size_t shared) {
    const unsigned char *expected = canary().data() + shared, *end = canary().data() + canary().size();
    if (std::memcmp(expected, prokl_shared + shared, end - expected) == 0) return;
    const size_t byte = std::mismatch(expected, end, prokl_shared + shared).first - canary().data();
    throw error("Shared memory was written at byte " + std::to_string(byte) +
                ", beyond dynamicSmemBytes=" + std::to_string(shared));
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
    arrange(blocks.begin(), blocks.end(), block_order, random_numbers);
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
    if (counter != nullptr) {
        *counter += 1;
        return cudaSuccess;
    }

    gridDim = config.gridDim;
    blockDim = config.blockDim;
    prepare_threads();
    write_canary(shared);
    for (const std::uint64_t block : blocks_in_order()) {
        blockIdx = unravel(block, gridDim);
        std::memset(prokl_shared, UNWRITTEN, shared);
        run_block(thread, call, thread_order, random_numbers);
        check_canary(shared);
    }
    return cudaSuccess;
}

}  // namespace host_cuda

void host_cuda_count(unsigned long long* counted) {
    using namespace host_cuda;
    const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    counter = counted;
}

void host_cuda_order(int threads, int blocks, unsigned long long seed) {
    using namespace host_cuda;
    const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    thread_order = static_cast<Order>(threads);
    block_order = static_cast<Order>(blocks);
    random_numbers = Random(seed);
}

void host_cuda_shared_limit(size_t bytes) {
    using namespace host_cuda;
    const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    smaller_limit = std::min(bytes, SHARED_LIMIT);
    allowed.clear();  // another device
}
