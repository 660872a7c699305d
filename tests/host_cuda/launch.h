// What the host asks of the device.
#pragma once

#pragma GCC visibility push(hidden)

namespace host_cuda {

constexpr size_t SHARED_UNASKED = 48 * 1024;  // bytes of shared memory a launch may have without cudaFuncSetAttribute
constexpr size_t SHARED_LIMIT = 227 * 1024;   // of compute capability 9.0 and 10.0

size_t shared_limit();  // of the device: SHARED_LIMIT unless host_cuda_shared_limit said less

cudaError_t allow_shared(const void* kernel, int bytes);

// Run the whole grid; thread(call) is what each of its threads does.
cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, void (*thread)(void*), void* call);

}  // namespace host_cuda

#pragma GCC visibility pop

// From the next launch on a block's threads run between barriers, and the blocks, in an order shuffled by the seed; 0: as
// they are numbered. A result that changes with it was not synchronised.
extern "C" __attribute__((visibility("default"))) void host_cuda_shuffle(unsigned long long seed);

// From the next launch on: bytes of shared memory that a block may have, as on a smaller device; 0: SHARED_LIMIT.
extern "C" __attribute__((visibility("default"))) void host_cuda_shared_limit(size_t bytes);

extern "C" __attribute__((visibility("default"))) unsigned long long host_cuda_launches();
