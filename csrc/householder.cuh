// Householder QR by one block of threads, and TSQR over such leaves: what no conditioning can break.
#pragma once

#include "product.cuh"

namespace prokl {

constexpr int CHUNK = 128;  // columns that a reflection handles at a time: four to a lane

template <class T>
constexpr int LEAF = 2 * BLOCK<T>;  // rows of a leaf: two triangles of BLOCK columns, 131 KiB with the padding

// Smallest number with all digits: squares that add up to less than one for each of them have lost theirs.
template <class T>
constexpr T NORMAL = std::numeric_limits<T>::min();

// Elements between rows of a leaf in shared memory; odd, so that a column meets all banks.
__host__ __device__ inline int leaf_pitch(int k) { return k | 1; }

template <class T>
size_t householder_shared(int rows, int k, bool staged) {
    return ((staged ? size_t(rows) * leaf_pitch(k) : 0) + WARPS * CHUNK + WARPS + 2 * k) * sizeof(T);
}

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

// A (rows x k, rows >= k) <- Q of its QR with a non-negative diagonal in R, by all THREADS threads; R (k x k, leading
// dimension k, upper triangle and zeros) is stored if given. `scratch`: WARPS CHUNK + WARPS + 2 k elements.
template <class T>
__device__ void householder(T* A, Index ld, int rows, int k, T* R, T* scratch) {
    T* partial = scratch;
    T* sums = partial + WARPS * CHUNK;
    T* tau = sums + WARPS;
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
        if (R != nullptr) R[e] = c >= i ? sign[i] * A[i * ld + c] : T(0);
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

// A (B,n,k) <- Q run by run, and R (B,runs.count k,k) if R.data is given. STAGED: a run fits in shared memory;
// otherwise it is worked on where it lies.
template <class T, bool STAGED>
__global__ void __launch_bounds__(THREADS, 1)
    householder_kernel(Batch<T> A, Runs runs, int k, Batch<T> R, Active active) {
    const int b = blockIdx.z, run = blockIdx.x;
    if (!active(b)) return;
    const int rows = runs.length(run);
    T* matrix = A[b] + runs.start(run) * A.ld;
    T* triangle = R.data == nullptr ? nullptr : R[b] + Index(run) * k * k;
    T* shared = dynamic_shared<T>();
    if (!STAGED) {
        householder(matrix, A.ld, rows, k, triangle, shared);
        return;
    }
    const int pitch = leaf_pitch(k);
    T* leaf = shared + WARPS * CHUNK + WARPS + 2 * k;
    for (int e = threadIdx.x; e < rows * k; e += THREADS) leaf[e / k * pitch + e % k] = matrix[e / k * A.ld + e % k];
    __syncthreads();
    householder(leaf, Index(pitch), rows, k, triangle, shared);
    for (int e = threadIdx.x; e < rows * k; e += THREADS) matrix[e / k * A.ld + e % k] = leaf[e / k * pitch + e % k];
}

// Elements that tsqr needs for the triangles of one matrix.
template <class T>
size_t tsqr_workspace(int n, int k) {
    if (k > BLOCK<T>) return 0;
    const Runs runs = Runs::of(n, LEAF<T>);
    return runs.count == 1 ? 0 : size_t(runs.count) * k * k + tsqr_workspace<T>(runs.count * k, k);
}

// A (B,n,k) <- Q of its QR by one block of threads to each run of rows, in shared memory where the largest run fits.
template <class T>
void householder_runs(Batch<T> A, Runs runs, int k, Batch<T> R, int batch, Active active, cudaStream_t stream) {
    const size_t staged = householder_shared<T>(runs.most(), k, true);
    const bool fits = staged <= shared_limit();
    launch(fits ? householder_kernel<T, true> : householder_kernel<T, false>, dim3(runs.count, 1, batch), THREADS,
           fits ? staged : householder_shared<T>(runs.most(), k, false), stream, A, runs, k, R, active);
}

// A (B,n,k) <- Q of its QR: leaves, then the QR of their stacked triangles, whose Q is multiplied back into theirs. One
// leaf is enough for what fits in shared memory. What is wider than a block is one leaf in global memory, slowly: a
// last resort.
template <class T>
void tsqr(Batch<T> A, int n, int k, T* triangles, int batch, Active active, cudaStream_t stream) {
    const bool one = k > BLOCK<T> || n <= LEAF<T> || householder_shared<T>(n, k, true) <= shared_limit();
    if (one) {
        householder_runs<T>(A, Runs::of(n, n), k, Batch<T>{}, batch, active, stream);
        return;
    }
    const Runs runs = Runs::of(n, LEAF<T>);
    const Index stride = Index(runs.count) * k * k;
    const Batch<T> R{triangles, stride, k};
    householder_runs<T>(A, runs, k, R, batch, active, stream);
    tsqr<T>(R, runs.count * k, k, triangles + batch * stride, batch, active, stream);
    launch(apply_kernel<T, false>, dim3(ceil_div(runs.most(), BLOCK<T>), runs.count, batch), THREADS,
           PRODUCT_SHARED<T>, stream, A, A, R, Index(k) * k, k, runs, active);
}

}  // namespace prokl
