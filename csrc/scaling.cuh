// What goes before and after the factorisation: scales that neither over- nor underflow, shifts, verdicts.
#pragma once

#include "product.cuh"

namespace prokl {

constexpr int ROWS = 64;  // of a matrix to one block of threads here
constexpr int NO_EXPONENT = -2139062144;  // 0x80808080, what cudaMemsetAsync leaves: a column of zeros
constexpr int NOT_FINITE = 1 << 20;
constexpr int SAFE = 24;  // exponents up to which squares and their sums are far from over- and underflow

// exponents (B,k) <- the binary exponent of every column's largest element, NOT_FINITE if there is none.
template <class T>
__global__ void __launch_bounds__(THREADS)
    exponents_kernel(Batch<const T> A, int n, int k, T largest, int* exponents) {
    const int column = blockIdx.x * 32 + threadIdx.x % 32, b = blockIdx.z;
    if (column >= k) return;
    const T* a = A[b] + column;
    T most = 0;
    bool finite = true;
    const int end = min(n, static_cast<int>(blockIdx.y + 1) * ROWS);
    for (int i = blockIdx.y * ROWS + threadIdx.x / 32; i < end; i += WARPS) {
        const T size = fabs(a[i * A.ld]);
        finite = finite && size <= largest;  // false for NaN
        most = size > most ? size : most;
    }
    int exponent = NO_EXPONENT;
    if (!finite)
        exponent = NOT_FINITE;
    else if (most > T(0))
        frexp(most, &exponent);
    if (exponent != NO_EXPONENT) atomicMax(exponents + Index(b) * k + column, exponent);
}

// scale (B,k) <- powers of two that bring every column (`uniform`: the matrix) to a largest element in [1/2, 1), or 1
// where that is not needed, so that orthonormal columns stay that.
template <class T>
__global__ void __launch_bounds__(THREADS)
    scale_kernel(const int* exponents, T* scale, int k, bool uniform, int limit, int* state) {
    const int b = blockIdx.x;
    int* most = dynamic_shared<int>();
    if (threadIdx.x == 0) *most = NO_EXPONENT;
    __syncthreads();
    for (int c = threadIdx.x; c < k; c += THREADS) atomicMax(most, exponents[Index(b) * k + c]);
    __syncthreads();
    for (int c = threadIdx.x; c < k; c += THREADS) {
        const int exponent = uniform ? *most : exponents[Index(b) * k + c];
        const bool safe = exponent == NO_EXPONENT || (exponent >= -SAFE && exponent <= SAFE);
        scale[Index(b) * k + c] = safe ? T(1) : ldexp(T(1), max(-limit, min(limit, -exponent)));
    }
    if (threadIdx.x == 0 && *most == NOT_FINITE) state[b] = NONFINITE | DONE;
}

// W <- A diag(scale) + shift U, all (B,n,k); without U the shift is nothing.
template <class T>
__global__ void __launch_bounds__(THREADS) prepare_kernel(Batch<const T> A, Batch<const T> U, Batch<T> W, int n, int k,
                                                          const T* scale, const T* shift, Active active) {
    const int b = blockIdx.z;
    if (!active(b)) return;
    const T delta = U.data == nullptr ? T(0) : shift[b];
    const int first = blockIdx.x * ROWS, rows = min(ROWS, n - first);
    const T* a = A[b] + first * A.ld;
    const T* u = delta == T(0) ? nullptr : U[b] + first * U.ld;
    T* w = W[b] + first * W.ld;
    for (int e = threadIdx.x; e < rows * k; e += THREADS) {
        const int i = e / k, c = e % k;
        const T value = a[i * A.ld + c] * scale[Index(b) * k + c];
        w[i * W.ld + c] = u == nullptr ? value : value + delta * u[i * U.ld + c];
    }
}

// N <- lower triangle of scale K + shift I, zeros above, and its diagonal (B,k). One scale for the whole matrix.
template <class T>
__global__ void __launch_bounds__(THREADS)
    load_kernel(Batch<const T> K, Batch<T> N, T* diagonal, int k, const T* scale, const T* shift, Active active) {
    const int b = blockIdx.z;
    if (!active(b)) return;
    const T factor = scale[Index(b) * k], delta = shift[b];
    const int first = blockIdx.x * ROWS, rows = min(ROWS, k - first);
    for (int e = threadIdx.x; e < rows * k; e += THREADS) {
        const int i = first + e / k, c = e % k;
        T value = c > i ? T(0) : factor * K[b][i * K.ld + c];
        if (c == i) {
            value += delta;
            diagonal[Index(b) * k + i] = value;
        }
        N[b][i * N.ld + c] = value;
    }
}

// Where the factorisation of K had to raise a pivot: the shift with which it will not have to.
template <class T>
__global__ void __launch_bounds__(THREADS)
    shift_kernel(const T* diagonal, int k, T relative, T* shift, int* state, Active active) {
    const int b = blockIdx.x;
    if (!active(b)) return;
    T most = 0;
    for (int c = threadIdx.x; c < k; c += THREADS) most = max(most, diagonal[Index(b) * k + c]);
    for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
    T* warps = dynamic_shared<T>();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < WARPS; ++w) most = max(most, warps[w]);
    shift[b] = most > T(0) ? relative * most : T(1);  // of a zero matrix U is what is left
    state[b] = (state[b] & ~RAISED) | SHIFTED;
}

// orthogonality (B) <- ||W^T W - I||_F from the Gram matrix's blocks; within `bound` the matrix is done, otherwise it
// takes `otherwise`: another pass, the fallback, or the verdict that there is nothing to factor.
template <class T>
__global__ void __launch_bounds__(THREADS) judge_kernel(const T* deviation, int blocks, T bound, int otherwise,
                                                        float* orthogonality, int* state, Active active) {
    const int b = blockIdx.x;
    if (!active(b)) return;
    T square = 0;
    for (int i = threadIdx.x; i < blocks; i += THREADS) square += deviation[Index(b) * blocks + i];
    const T size = sqrt(block_sum(square, dynamic_shared<T>()));
    if (threadIdx.x != 0) return;
    orthogonality[b] = static_cast<float>(size);
    if (size <= bound)
        state[b] |= DONE;
    else
        state[b] += otherwise;  // PASS is a count, the others are set once
}

// Where the matrix was not finite: U, or NaN without it.
template <class T>
__global__ void __launch_bounds__(THREADS) conclude_kernel(Batch<const T> U, Batch<T> Q, int n, int k, T nothing,
                                                           float* orthogonality, Active active) {
    const int b = blockIdx.z;
    if (!active(b)) return;
    const int first = blockIdx.x * ROWS, rows = min(ROWS, n - first);
    for (int e = threadIdx.x; e < rows * k; e += THREADS) {
        const Index i = first + e / k;
        const int c = e % k;
        Q[b][i * Q.ld + c] = U.data == nullptr ? nothing : U[b][i * U.ld + c];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) orthogonality[b] = static_cast<float>(nothing);
}

}  // namespace prokl
