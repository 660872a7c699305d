#include "entry.cuh"

namespace prokl {
PROKL_INSTANTIATE(float)
}  // namespace prokl
