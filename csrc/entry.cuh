// Definitions of interface.h, instantiated by one source file for each type so that they compile side by side.
#pragma once

#include "interface.h"
#include "qr.cuh"

namespace prokl {

template <class T>
Batch<T> typed(Matrices matrices) {
    return {static_cast<T*>(matrices.data), matrices.stride, matrices.ld};
}

template <class T>
Solver<T> solver(Size size, Call call) {
    return {size, call.workspace, call.state, call.orthogonality, static_cast<cudaStream_t>(call.stream)};
}

template <class T>
size_t workspace_bytes(Size size) {
    return Solver<T>::bytes(size);
}

template <class T>
void qr(Size size, Matrices A, Matrices Q, Call call) {
    solver<T>(size, call).qr(typed<T>(A), typed<T>(Q));
}

template <class T>
void tracking_qr(Size size, Matrices V, Matrices K, Matrices U, Matrices Q, Call call) {
    solver<T>(size, call).tracking_qr(typed<T>(V), typed<T>(K), typed<T>(U), typed<T>(Q));
}

template <class T>
void semidefinite_qr(Size size, Matrices S, Matrices Q, Call call) {
    solver<T>(size, call).semidefinite_qr(typed<T>(S), typed<T>(Q));
}

template <class T>
std::vector<std::pair<std::string, size_t>> shared_memory() {
    const size_t sums = sizeof(T) * WARPS;
    return {
        {"gram_kernel", PRODUCT_SHARED<T>},   {"sum_splits_kernel", PRODUCT_SHARED<T>},
        {"apply_kernel", PRODUCT_SHARED<T>},  {"outer_kernel", PRODUCT_SHARED<T>},
        {"factor_kernel", FACTOR_SHARED<T>},  {"householder_kernel<true>", householder_shared<T>(LEAF<T>, BLOCK<T>, true)},
        {"householder_kernel<false>", householder_shared<T>(4096, 4096, false)},
        {"exponents_kernel", 0},              {"scale_kernel", sizeof(int)},
        {"prepare_kernel", 0},                {"load_kernel", 0},
        {"shift_kernel", sums},               {"judge_kernel", sums},
        {"conclude_kernel", 0},
    };
}

#define PROKL_INSTANTIATE(T)                                                          \
    template size_t workspace_bytes<T>(Size);                                         \
    template void qr<T>(Size, Matrices, Matrices, Call);                              \
    template void tracking_qr<T>(Size, Matrices, Matrices, Matrices, Matrices, Call); \
    template void semidefinite_qr<T>(Size, Matrices, Matrices, Call);                 \
    template std::vector<std::pair<std::string, size_t>> shared_memory<T>();

}  // namespace prokl
