// Definitions of interface.h, instantiated by one source file for each type so that they compile side by side.
#pragma once

#include "cholesky.cuh"
#include "householder.cuh"
#include "interface.h"

namespace prokl {

template <class T>
Batch<T> typed(Matrices matrices) {
    return {static_cast<T*>(matrices.data), matrices.stride, matrices.ld};
}

template <class T>
Sum<T> typed(Sums sums) {
    return {typed<T>(sums.first), sums.parts, sums.apart};
}

template <class T>
void factor(int batch, int k, Sums N, Kind kind, Factors to, const int* before, void* stream) {
    // Blocks of more columns than BLOCK replace N itself where C has no place of its own.
    const Matrices C = to.C.data == nullptr && k > BLOCK<T> ? N.first : to.C;
    const Outputs<T> out{typed<T>(C), typed<T>(to.F), typed<T>(to.shifted), static_cast<T*>(to.scale), before,
                         to.status};
    Factorisation<T>{batch, k, kind, Pivots<T>::of(kind, k), out, to.invert, static_cast<T*>(to.diagonal),
                     static_cast<cudaStream_t>(stream)}
        .run(typed<T>(N));
}

// ||Q^T Q - I||_F with which a matrix is done.
template <class T>
T acceptable(int k) {
    return T(100) * T(k) * std::numeric_limits<T>::epsilon();
}

template <class T>
void finish(int batch, int n, int k, Matrices A, Sums N, Matrices kept, Matrices Q, bool of_root, void* work,
            const int* before, int* status, void* stream) {
    if (work != nullptr && N.first.data != nullptr)
        launch(deviation_kernel<T>, dim3(ceil_div(k, ROWS), 1, batch), THREADS, sizeof(T) * WARPS,
               static_cast<cudaStream_t>(stream), typed<T>(N), k, static_cast<T*>(work));
    const size_t staged = finish_shared<T>(n, k, true, work == nullptr);
    const bool fits = staged <= std::min(STAGED_SHARED<T>, shared_limit());
    launch(fits ? finish_kernel<T, true> : finish_kernel<T, false>, dim3(1, 1, batch), THREADS,
           fits ? staged : finish_shared<T>(n, k, false, work == nullptr), static_cast<cudaStream_t>(stream), typed<T>(N),
           static_cast<T*>(work), acceptable<T>(k), of_root ? LOST : 0, typed<T>(A), typed<T>(kept),
           typed<T>(Q), n, k, before, status);
}

template <class T>
int block_columns() {
    return BLOCK<T>;
}

#define PROKL_INSTANTIATE(T)                                                                                  \
    template void factor<T>(int, int, Sums, Kind, Factors, const int*, void*);                                \
    template void finish<T>(int, int, int, Matrices, Sums, Matrices, Matrices, bool, void*, const int*, int*, \
                            void*);                                                                           \
    template int block_columns<T>();

}  // namespace prokl
