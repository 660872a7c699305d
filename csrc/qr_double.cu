#include "entry.cuh"

namespace prokl {
PROKL_INSTANTIATE(double)
}  // namespace prokl
