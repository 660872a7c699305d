// The end of a QR: a look at the Gram matrix, and Householder's QR by one block of threads where it is not the identity,
// which no conditioning can break.
#pragma once

#include "cholesky.cuh"

namespace prokl {

constexpr int CHUNK = 128;  // columns that a reflection handles at a time: four to a lane

// Elements between rows of a matrix in shared memory; odd, so that a column meets all banks.
__host__ __device__ constexpr int pitch_of(int k) { return k | 1; }

// `staged`: with the matrix itself. `columns`: with two elements a column, which many columns have in global memory.
template <class T>
constexpr size_t finish_shared(int n, int k, bool staged, bool columns) {
    return ((staged ? size_t(n) * pitch_of(k) : 0) + WARPS * CHUNK + WARPS + (columns ? 2 * k : 0)) * sizeof(T);
}
// The largest matrix that is staged: 128 x 128, in 142 KB of float64 and half of it in float32.
template <class T>
constexpr size_t STAGED_SHARED = finish_shared<T>(128, 128, true, true);

// Columns [from, to) of A <- (I - tau v v^T) times them, with v_j = 1 and the rest of v in column j below row j.
template <class T>
__device__ void reflect(T* A, Index ld, int rows, int j, int from, int to, T tau, T* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int c0 = from; c0 < to; c0 += CHUNK) {
        T sum[4] = {};
        for (int i = j + warp; i < rows; i += WARPS) {
            const T v = i == j ? T(1) : A[i * ld + j];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int c = c0 + lane + 32 * q;
                if (c < to) sum[q] += v * A[i * ld + c];
            }
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) partial[warp * CHUNK + lane + 32 * q] = sum[q];
        __syncthreads();
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            sum[q] = 0;
            for (int w = 0; w < WARPS; ++w) sum[q] += partial[w * CHUNK + lane + 32 * q];
            sum[q] *= tau;
        }
        for (int i = j + warp; i < rows; i += WARPS) {
            const T v = i == j ? T(1) : A[i * ld + j];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int c = c0 + lane + 32 * q;
                if (c < to) A[i * ld + c] -= v * sum[q];
            }
        }
        __syncthreads();
    }
}

// A (rows x k, rows >= k) <- Q of its QR with a non-negative diagonal in R, by all THREADS threads. `partial`:
// WARPS CHUNK + WARPS elements; `tau`: 2 k of them.
template <class T>
__device__ void householder(T* A, Index ld, int rows, int k, T* partial, T* tau) {
    T* sums = partial + WARPS * CHUNK;
    T* sign = tau + k;
    for (int j = 0; j < k; ++j) {
        T square = 0;
        for (int i = j + 1 + threadIdx.x; i < rows; i += THREADS) square += A[i * ld + j] * A[i * ld + j];
        square = block_sum(square, sums);
        const T alpha = A[j * ld + j];
        const T length = sqrt(alpha * alpha + square);
        const bool nothing = square == T(0) || alpha * alpha + square < rows * NORMAL<T>;  // no reflection
        const T beta = nothing ? alpha : alpha > T(0) ? -length : length;
        const T reflection = nothing ? T(0) : (beta - alpha) / beta;
        const T inverse = nothing ? T(0) : T(1) / (alpha - beta);
        __syncthreads();  // alpha is read by all before its place is taken
        for (int i = j + 1 + threadIdx.x; i < rows; i += THREADS) A[i * ld + j] *= inverse;
        if (threadIdx.x == 0) {
            A[j * ld + j] = beta;
            tau[j] = reflection;
            sign[j] = beta < T(0) ? T(-1) : T(1);
        }
        __syncthreads();
        reflect(A, ld, rows, j, j + 1, k, reflection, partial);
    }
    for (Index e = threadIdx.x; e < Index(k) * k; e += THREADS) {
        const Index i = e / k, c = e % k;
        if (c > i) A[i * ld + c] = T(0);  // the identity that the reflections are applied to
    }
    __syncthreads();
    for (int j = k - 1; j >= 0; --j) {
        reflect(A, ld, rows, j, j + 1, k, tau[j], partial);
        const T minus = -tau[j];
        for (int i = j + 1 + threadIdx.x; i < rows; i += THREADS) A[i * ld + j] *= minus;
        if (threadIdx.x == 0) A[j * ld + j] = T(1) + minus;
        __syncthreads();
    }
    for (Index e = threadIdx.x; e < Index(rows) * k; e += THREADS) A[e / k * ld + e % k] *= sign[e % k];
    __syncthreads();
}

// scale (k) <- the powers of two that bring the columns of A (n x k) to a largest element in [1/2, 1), in each of which
// squares are sums of numbers with all digits. False in all threads where A has NaN or infinity.
template <class T>
__device__ bool column_scales(const T* A, Index ld, int n, int k, T* scale, T* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T bad = 0;
    for (int c0 = 0; c0 < k; c0 += CHUNK) {
        T most[4] = {};
        for (int i = warp; i < n; i += WARPS)
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int c = c0 + lane + 32 * q;
                const T size = c < k ? fabs(A[i * ld + c]) : T(0);
                if (!(size <= LARGEST<T>)) bad = 1;  // also NaN
                most[q] = max(most[q], size);
            }
#pragma unroll
        for (int q = 0; q < 4; ++q) partial[warp * CHUNK + lane + 32 * q] = most[q];
        __syncthreads();
        for (int c = threadIdx.x; c < CHUNK && c0 + c < k; c += THREADS) {
            T largest = 0;
            for (int w = 0; w < WARPS; ++w) largest = max(largest, partial[w * CHUNK + c]);
            scale[c0 + c] = scale_down<T>(exponent_of(largest));
        }
        __syncthreads();
    }
    return block_sum(bad, partial) == T(0);
}

// The sum of squares of N - I in some rows of N (k x k), the same in all threads; `scratch` holds WARPS elements.
template <class T>
__device__ T deviation(const Sum<T>& N, int b, int k, int first, int rows, T* scratch) {
    T square = 0;
    for (int i = first + threadIdx.x / 32; i < first + rows; i += WARPS)
#pragma unroll 4
        for (int c = threadIdx.x % 32; c < k; c += 32) {
            const T off = N.at(b, i, c) - T(i == c ? 1 : 0);
            square += off * off;
        }
    return block_sum(square, scratch);
}

// Elements of one matrix of many columns to work with: two a column, then its deviations.
__host__ __device__ constexpr int work_of(int k) { return 2 * k + (k + ROWS - 1) / ROWS; }

// work (B,work_of(k)) takes, behind 2 k elements, the deviations of runs of ROWS rows: a whole one takes a block long.
template <class T>
__global__ void __launch_bounds__(THREADS, 4) deviation_kernel(Sum<T> N, int k, T* work) {
    const int first = blockIdx.x * ROWS;
    const T square = deviation(N, blockIdx.z, k, first, min(ROWS, k - first), dynamic_shared<T>());
    if (threadIdx.x == 0) work[Index(blockIdx.z) * work_of(k) + 2 * k + blockIdx.x] = square;
}

// Q (B,n,k) stays where its Gram matrix N is within `acceptable` of the identity, in Frobenius' norm, unless what it was
// made of is `wrong` (a bit of `before`, or 0). Elsewhere, and without N, it becomes Q of A's QR by Householder; of an A
// that is not finite `kept`, or NaN without it. `work`, if given, has what deviation_kernel left of N. STAGED: A
// fits in shared memory; otherwise Q is worked on where it lies.
template <class T, bool STAGED>
__global__ void __launch_bounds__(THREADS, 1)
    finish_kernel(Sum<T> N, T* work, T acceptable, int wrong, Batch<const T> A, Batch<const T> kept,
                  Batch<T> Q, int n, int k, const int* before, int* status) {
    const int b = blockIdx.z;
    T* partial = dynamic_shared<T>();
    const int done = before == nullptr ? 0 : before[b];
    if (work != nullptr) work += Index(b) * work_of(k);
    if (N.first.data != nullptr && (done & wrong) == 0) {
        T square = 0;
        if (work == nullptr)
            square = deviation(N, b, k, 0, k, partial);
        else
            for (int i = 2 * k; i < work_of(k); ++i) square += work[i];
        if (sqrt(square) <= acceptable) {  // false for NaN
            if (threadIdx.x == 0) status[b] = done;
            return;
        }
    }
    T* shared = partial + WARPS * CHUNK + WARPS;
    T* scale = work == nullptr ? shared : work;  // where Householder has its factors later on
    const T *from = A[b], *otherwise = kept.data == nullptr ? nullptr : kept[b];
    T* to = Q[b];
    const bool finite = column_scales(from, A.ld, n, k, scale, partial);
    if (threadIdx.x == 0) status[b] = finite ? done | HOUSEHOLDER : NONFINITE;
    if (!finite) {
        for (Index e = threadIdx.x; e < Index(n) * k; e += THREADS)
            to[e / k * Q.ld + e % k] = otherwise == nullptr ? QUIET_NAN<T> : otherwise[e / k * kept.ld + e % k];
        return;
    }
    T* place = STAGED ? shared + (work == nullptr ? 2 * k : 0) : to;
    const Index ld = STAGED ? Index(pitch_of(k)) : Q.ld;
    for (Index e = threadIdx.x; e < Index(n) * k; e += THREADS)
        place[e / k * ld + e % k] = from[e / k * A.ld + e % k] * scale[e % k];
    __syncthreads();
    householder(place, ld, n, k, partial, scale);
    if constexpr (STAGED)
        for (Index e = threadIdx.x; e < Index(n) * k; e += THREADS) to[e / k * Q.ld + e % k] = place[e / k * ld + e % k];
}

}  // namespace prokl
