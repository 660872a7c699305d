#include <cuda_runtime.h>

#include "interface.h"

namespace prokl {

int built_with() { return CUDART_VERSION; }

int driver_knows() {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace prokl
