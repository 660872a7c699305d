// Cholesky factorisation with the triangular inverse: one launch for up to BLOCK columns, blocked beyond.
#pragma once

#include "sweep.cuh"

namespace prokl {

constexpr int ROWS = 64;  // of a matrix to a block of threads where nothing is multiplied
constexpr int SAFE = 24;  // exponents up to which squares and their sums are far from over- and underflow

// The power of two that brings a largest element to [1/2, 1), or 1 where that is not needed.
template <class T>
__device__ T scale_of(T largest) {
    const int exponent = exponent_of(largest);
    return exponent >= -SAFE && exponent <= SAFE ? T(1) : scale_down<T>(exponent);
}

// The largest element of the diagonal of matrix b (k x k), or 0, the same in all lanes of a warp; NaN loses.
template <class T>
__device__ T largest_on_diagonal(const Sum<T>& N, int b, int k) {
    T most = 0;
    for (int c = threadIdx.x % 32; c < k; c += 32) most = max(most, N.at(b, c, c));
    for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
    return most;
}

// The shift with which a factorisation of a matrix with this largest element will not have to raise a pivot.
template <class T>
__device__ T shift_of(T largest, T noise) {
    return largest > T(0) ? noise * largest : T(1);  // what is left of a zero matrix
}

// Outputs of a factorisation, as of Factors.
template <class T>
struct Outputs {
    Batch<T> C, F, shifted;
    T* scale;
    const int* before;
    int* status;
};

// The upper triangle that takes nearly orthonormal columns of Gram matrix N to orthonormal ones, up to the square of
// their distance: 3/2 I - (N's part above the diagonal and half of the diagonal). Q of their QR stays what it is.
template <class T>
__device__ __forceinline__ T settling(int row, int column, T value) {
    return row == column ? T(1.5) - value / T(2) : -value;
}

// All that Kind asks for, of one matrix of k <= BLOCK columns to a block.
template <class T>
__global__ void __launch_bounds__(FACTOR_THREADS, 1)
    factor_kernel(Sum<T> N, Outputs<T> out, int k, Kind kind, Pivots<T> pivots) {
    constexpr int E = EDGE<T>;
    const int b = blockIdx.z;
    const int before = out.before == nullptr ? 0 : out.before[b];
    int i, j;
    lower_block(threadIdx.x, i, j);
    Accumulator<T> a;
    load_tile<T>(a, i, j, k, N.first[b], N.first.ld, N.parts, N.apart);
    if (kind == SETTLE && (before & RAISED) == 0) {
#pragma unroll
        for (int r = 0; r < E; ++r)
#pragma unroll
            for (int c = 0; c < E; ++c) a[r][c] = settling(i * E + r, j * E + c, a[r][c]);
        store_inverse<T>(a, i, j, k, out.F[b], out.F.ld);
        if (threadIdx.x == 0) out.status[b] = before;
        return;
    }
    if (out.shifted.data != nullptr) store_symmetric<T>(a, i, j, k, out.shifted[b], out.shifted.ld);
    const auto board = Board<T>::make();
    T scale = 1, shift = 0, most = 0;
    if (kind == SEMIDEFINITE) {
        most = largest_on_diagonal(N, b, k);
        scale = scale_of(most);
        most *= scale;
    }
    int raised = 0, lost = 0;
    for (int attempt = 0;; ++attempt) {
        for (int c = threadIdx.x; c < k; c += FACTOR_THREADS) board.diagonal[c] = scale * N.at(b, c, c) + shift;
        if (threadIdx.x == 0) *board.raised = 0;
        if (attempt > 0) load_tile<T>(a, i, j, k, N.first[b], N.first.ld, N.parts, N.apart);
#pragma unroll
        for (int r = 0; r < E; ++r)
#pragma unroll
            for (int c = 0; c < E; ++c)
                if (i * E + r < k) a[r][c] = scale * a[r][c] + (r == c && i == j ? shift : T(0));
        __syncthreads();
        sweep<T>(a, i, j, board, k, pivots, out.C.data == nullptr ? nullptr : out.C[b], out.C.ld);
        if (attempt > 0) {
            lost = *board.raised;
            break;
        }
        raised = *board.raised;  // written before the barriers of the last step
        if (kind != SEMIDEFINITE || raised == 0) break;
        shift = shift_of(most, pivots.floor);
        __syncthreads();  // before anybody writes what others still read
    }
    if (threadIdx.x == 0) {
        out.status[b] = before | (raised == 0 ? 0 : kind == SEMIDEFINITE ? SHIFTED : RAISED) | (lost == 0 ? 0 : LOST);
        if (out.scale != nullptr) out.scale[b] = scale;
    }
    if (out.F.data != nullptr) store_inverse<T>(a, i, j, k, out.F[b], out.F.ld);
    if (out.C.data != nullptr)
        for (int e = threadIdx.x; e < k * k; e += FACTOR_THREADS)
            if (e % k > e / k) out.C[b][e / k * out.C.ld + e % k] = T(0);
    if (out.shifted.data != nullptr && raised != 0)
        for (int c = threadIdx.x; c < k; c += FACTOR_THREADS)
            out.shifted[b][c * out.shifted.ld + c] = N.at(b, c, c) + shift / scale;
}

// A block on the diagonal of a matrix of more columns: C replaces the lower triangle of N, zeros above, and F takes
// C^-T; `mark` tells of raised pivots. `diagonal`: of the matrix before it was factored, `across` elements from one
// matrix to the next.
template <class T>
__global__ void __launch_bounds__(FACTOR_THREADS, 1)
    corner_kernel(Batch<T> N, Batch<T> F, const T* diagonal, Index across, int k, Pivots<T> pivots, int mark,
                  int* status, Active active) {
    const int b = blockIdx.z;
    if (!active(b)) return;
    const auto board = Board<T>::make();
    int i, j;
    lower_block(threadIdx.x, i, j);
    for (int c = threadIdx.x; c < k; c += FACTOR_THREADS) board.diagonal[c] = diagonal[b * across + c];
    if (threadIdx.x == 0) *board.raised = 0;
    __syncthreads();
    Accumulator<T> a;
    load_tile<T>(a, i, j, k, N[b], N.ld, 1, 0);
    sweep<T>(a, i, j, board, k, pivots, N[b], N.ld);
    if (threadIdx.x == 0 && *board.raised != 0) status[b] |= mark;
    store_inverse<T>(a, i, j, k, F[b], F.ld);
}

// Before the blocks of a matrix are factored: C <- the lower triangle of scale N, zeros above; F <- zeros, or what
// settles; the diagonal, and the other outputs. AGAIN: of the matrices whose bit SHIFTED is set, with the shift.
template <class T>
__global__ void __launch_bounds__(THREADS)
    load_kernel(Batch<const T> N, Outputs<T> out, T* diagonal, int k, Kind kind, T noise, bool again) {
    const int b = blockIdx.z;
    if (again && (out.status[b] & SHIFTED) == 0) return;
    const int before = out.before == nullptr ? 0 : out.before[b];
    const bool settles = kind == SETTLE && (before & RAISED) == 0;
    T scale = 1, shift = 0;
    if (kind == SEMIDEFINITE) {
        const T most = largest_on_diagonal(Sum<T>{N, 1, 0}, b, k);
        scale = scale_of(most);
        if (again) shift = shift_of(most * scale, noise);
    }
    if (!again && blockIdx.x == 0 && threadIdx.x == 0) {
        out.status[b] = before;
        if (out.scale != nullptr) out.scale[b] = scale;
    }
    const int first = blockIdx.x * ROWS, rows = min(ROWS, k - first);
    const bool copies = out.C.data != N.data, fills = out.F.data != nullptr && !again;
    for (int e = threadIdx.x; e < rows * k; e += THREADS) {
        const int i = first + e / k, c = e % k;
        const bool lower = c <= i, reads = i == c || out.shifted.data != nullptr || (lower ? copies : settles);
        const T own = reads ? N[b][i * N.ld + c] : T(0), value = scale * own + (i == c ? shift : T(0));
        if (i == c) diagonal[Index(b) * k + i] = value;
        if (fills) out.F[b][i * out.F.ld + c] = settles && c >= i ? settling(i, c, own) : T(0);
        if (copies) out.C[b][i * out.C.ld + c] = lower ? value : T(0);
        if (out.shifted.data != nullptr) out.shifted[b][i * out.shifted.ld + c] = own + (i == c ? shift / scale : T(0));
    }
}

// As of interface.h, launch by launch.
template <class T>
class Factorisation {
  public:
    void run(Sum<T> N) const {
        if (k <= BLOCK<T>) {
            launch(factor_kernel<T>, dim3(1, 1, batch), FACTOR_THREADS, FACTOR_SHARED<T>, stream, N, out, k, kind, pivots);
            return;
        }
        load(N.first, false);
        blocks(Active{out.before, kind == SETTLE ? RAISED : 0}, kind == SEMIDEFINITE ? SHIFTED : RAISED);
        if (kind != SEMIDEFINITE) return;
        load(N.first, true);
        blocks(Active{out.status, SHIFTED}, LOST);
    }

    int batch, k;
    Kind kind;
    Pivots<T> pivots;
    Outputs<T> out;
    bool invert;
    T* diagonal;
    cudaStream_t stream;

  private:
    void load(Batch<const T> N, bool again) const {
        auto whole = out;
        if (!invert) whole.F.data = nullptr;  // a strip, which is written before it is read
        launch(load_kernel<T>, dim3(ceil_div(k, ROWS), 1, batch), THREADS, 0, stream, N, whole, diagonal, k, kind,
               pivots.floor, again);
    }

    void blocks(Active active, int mark) const {
        constexpr int S = BLOCK<T>;
        const Batch<T> C = out.C, F = out.F;
        for (int j = 0; j < k; j += S) {
            const int width = std::min(S, k - j), rest = k - j - width;
            const Batch<T> corner = F.from(j, invert ? j : 0);
            launch(corner_kernel<T>, dim3(1, 1, batch), FACTOR_THREADS, FACTOR_SHARED<T>, stream, C.from(j, j), corner,
                   diagonal + j, Index(k), width, pivots, mark, out.status, active);
            if (rest == 0) break;
            const Batch<T> below = C.from(j + S, j);
            launch(apply_kernel<T>, dim3(ceil_div(rest, S), 1, batch), THREADS, PRODUCT_SHARED<T>, stream, below, below,
                   corner, rest, S, active);
            launch(outer_kernel<T>, dim3(lower_blocks(ceil_div(rest, S)), 1, batch), THREADS, PRODUCT_SHARED<T>, stream,
                   below, C.from(j + S, j + S), rest, active);
        }
        if (!invert) return;
        for (int i = S; i < k; i += S)
            launch(inverse_kernel<T>, dim3(i / S, 1, batch), THREADS, PRODUCT_SHARED<T>, stream, F, C.from(i, 0),
                   F.from(i, i), F.from(0, i), i, std::min(S, k - i), active);
    }
};

}  // namespace prokl
