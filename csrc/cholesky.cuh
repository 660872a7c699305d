// Cholesky factorisation with the triangular inverse: one launch for up to BLOCK columns, blocked beyond.
#pragma once

#include <cmath>

#include "interface.h"
#include "product.cuh"

namespace prokl {

constexpr int FACTOR_THREADS = 160;  // one to each of the 136 lower tiles of 16 x 16, in whole warps
constexpr int ROWS = 64;  // of a matrix to a block of threads where nothing is multiplied
constexpr int SAFE = 24;  // exponents up to which squares and their sums are far from over- and underflow

template <class T>
constexpr size_t FACTOR_SHARED = (EDGE<T> * EDGE<T> + 2 * BLOCK<T> * EDGE<T> + BLOCK<T>) * sizeof(T) + 16;

// A pivot below `floor` times the matrix's diagonal there is rounding noise and becomes `raised` times it.
template <class T>
struct Pivots {
    T floor, raised;

    static Pivots of(Kind kind, int k) {
        constexpr T EPS = std::numeric_limits<T>::epsilon();
        // Relative to its column's squared length: below that a pivot is rounding noise, which adds up over k columns
        // like a random walk. As a shift of V it stays within 4 k eps ||V||_F.
        const T noise = T(4) * std::sqrt(T(k)) * EPS;
        if (kind == SEMIDEFINITE) return {noise, noise};
        // In a pass a column counts as lost well above the noise: W is multiplied by an explicit inverse, so that what
        // rounding does to A goes with the inverse's norm, at most about a hundred then. The next pass finds a shorter
        // column, but one with its digits. Largest backward error of 2496 singular or nearly singular matrices of 20
        // and 60 columns, half of them in float64: 4.5 k eps ||A||_F, where raising at the noise gave up to 6000.
        const T lost = std::max(T(1e-4), T(30) * noise);
        return {lost, T(3) * lost};
    }
};

// The power of two that brings a largest element to [1/2, 1), or 1 where that is not needed.
template <class T>
__device__ T scale_of(T largest) {
    const int exponent = exponent_of(largest);
    return exponent >= -SAFE && exponent <= SAFE ? T(1) : scale_down<T>(exponent);
}

// The largest of a warp's values, in each of its lanes; NaN loses.
template <class T>
__device__ T warp_max(T value) {
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// The shift with which a factorisation of a matrix with this largest element will not have to raise a pivot.
template <class T>
__device__ T shift_of(T largest, T noise) {
    return largest > T(0) ? noise * largest : T(1);  // what is left of a zero matrix
}

// a = C C^T in the lower triangle of a tile; x = C^-1, zero above. Says whether a pivot was raised.
template <class T>
__device__ bool factor_tile(Accumulator<T>& a, Accumulator<T>& x, const T* diagonal, int existing, Pivots<T> pivots) {
    constexpr int E = EDGE<T>;
    bool raised = false;
#pragma unroll
    for (int c = 0; c < E; ++c) {
        T pivot = a[c][c];
        const T before = c < existing ? diagonal[c] : T(1);
        if (!(pivot > pivots.floor * before)) {  // true for NaN
            pivot = pivots.raised * before;
            if (!(pivot > T(0))) pivot = T(1);
            raised = true;
        }
        const T root = sqrt(pivot), inverse = T(1) / root;
        a[c][c] = root;
        x[c][c] = inverse;
#pragma unroll
        for (int r = c + 1; r < E; ++r) a[r][c] *= inverse;
#pragma unroll
        for (int q = c + 1; q < E; ++q)
#pragma unroll
            for (int r = q; r < E; ++r) a[r][q] -= a[r][c] * a[q][c];
    }
#pragma unroll
    for (int c = 0; c < E; ++c)
#pragma unroll
        for (int r = 0; r < E; ++r) {
            if (r < c) x[r][c] = T(0);
            if (r <= c) continue;
            T sum = 0;
#pragma unroll
            for (int q = c; q < r; ++q) sum += a[r][q] * x[q][c];
            x[r][c] = -sum * x[r][r];
        }
    return raised;
}

// What the threads of a factorisation share, in a launch's shared memory.
template <class T>
struct Board {
    T* corner;     // inverse of the tile on the diagonal, E x E
    T* panel;      // column p of C below the diagonal, BLOCK x E
    T* final_row;  // row p of C^-1, E x BLOCK
    T* diagonal;   // of the matrix before it is factored, BLOCK
    int* raised;

    __device__ static Board make() {
        constexpr int E = EDGE<T>;
        T* corner = dynamic_shared<T>();
        T* panel = corner + E * E;
        T* final_row = panel + BLOCK<T> * E;
        T* diagonal = final_row + E * BLOCK<T>;
        return {corner, panel, final_row, diagonal, reinterpret_cast<int*>(diagonal + BLOCK<T>)};
    }
};

// Factor and inverse of a matrix of k <= BLOCK columns in one sweep over the columns of its tiles: thread (i, j), i >= j,
// holds tile (i, j) of it in `a` until column j is done, and tile (i, j) of C^-1 from then on; either is updated once in
// every step. C, if given, takes the lower tiles of the factor, and zeros above the diagonal in those on it.
template <class T>
__device__ void sweep(Accumulator<T>& a, int i, int j, const Board<T>& board, int k, Pivots<T> pivots, T* C, Index ld) {
    constexpr int E = EDGE<T>;
    const int steps = (k + E - 1) / E, row0 = i * E, column0 = j * E;
    const bool mine = i < steps;  // also false for the threads beyond the triangle
    T *corner = board.corner, *panel = board.panel, *final_row = board.final_row;
    for (int p = 0; p < steps; ++p) {
        if (mine && i == p && j == p) {
            Accumulator<T> x;
            if (factor_tile<T>(a, x, board.diagonal + row0, k - row0, pivots)) *board.raised = 1;
#pragma unroll
            for (int r = 0; r < E; ++r)
#pragma unroll
                for (int c = 0; c < E; ++c) {
                    if (C != nullptr && row0 + r < k && row0 + c < k)
                        C[(row0 + r) * ld + row0 + c] = c <= r ? a[r][c] : T(0);
                    a[r][c] = x[r][c];
                    corner[r * E + c] = x[r][c];
                }
        }
        __syncthreads();
        if (mine && i > p && j == p) {  // C_ip = N_ip C_pp^-T
#pragma unroll
            for (int r = 0; r < E; ++r) {
                T out[E];
#pragma unroll
                for (int c = 0; c < E; ++c) {
                    T sum = 0;
#pragma unroll
                    for (int s = 0; s <= c; ++s) sum += a[r][s] * corner[c * E + s];
                    out[c] = sum;
                }
#pragma unroll
                for (int c = 0; c < E; ++c) {
                    panel[(row0 + r) * E + c] = out[c];
                    if (C != nullptr && row0 + r < k) C[(row0 + r) * ld + column0 + c] = out[c];
                    a[r][c] = T(0);
                }
            }
        }
        if (mine && i == p) {  // row p of the inverse: C_pp^-1 times what has been gathered
            if (j < p) {
#pragma unroll
                for (int c = 0; c < E; ++c) {
                    T out[E];
#pragma unroll
                    for (int r = 0; r < E; ++r) {
                        T sum = 0;
#pragma unroll
                        for (int s = 0; s <= r; ++s) sum += corner[r * E + s] * a[s][c];
                        out[r] = sum;
                    }
#pragma unroll
                    for (int r = 0; r < E; ++r) a[r][c] = out[r];
                }
            }
#pragma unroll
            for (int r = 0; r < E; ++r)
#pragma unroll
                for (int c = 0; c < E; ++c) final_row[r * BLOCK<T> + column0 + c] = a[r][c];
        }
        __syncthreads();
        if (mine && i > p) {
            const bool factoring = j > p;
            const T* left = panel + row0 * E;
            const T* right = factoring ? panel + column0 * E : final_row + column0;
            const int along = factoring ? 1 : BLOCK<T>, across = factoring ? E : 1;
#pragma unroll
            for (int s = 0; s < E; ++s) {
                T run[E];
#pragma unroll
                for (int c = 0; c < E; ++c) run[c] = right[s * along + c * across];
#pragma unroll
                for (int r = 0; r < E; ++r) {
                    const T factor = left[r * E + s];
#pragma unroll
                    for (int c = 0; c < E; ++c) a[r][c] -= factor * run[c];
                }
            }
        }
    }
}

// a <- tile (i, j) of the sum of `parts` matrices, `apart` elements apart, in the lower triangle; of the identity elsewhere.
template <class T>
__device__ __forceinline__ void load_tile(Accumulator<T>& a, int i, int j, int k, const T* N, Index ld, int parts,
                                          Index apart) {
    constexpr int E = EDGE<T>;
#pragma unroll
    for (int r = 0; r < E; ++r)
#pragma unroll
        for (int c = 0; c < E; ++c) a[r][c] = T(r == c && i == j && i * E + r >= k ? 1 : 0);
    const T* tile = N + i * E * ld + j * E;
#pragma unroll 1
    for (int part = 0; part < parts; ++part, tile += apart)
#pragma unroll
        for (int r = 0; r < E; ++r)
#pragma unroll
            for (int c = 0; c < E; ++c)
                if (i * E + r < k && j * E + c <= i * E + r) a[r][c] += tile[r * ld + c];
}

// F <- the transpose of the inverse of which `a` is tile (i, j), i >= j; zeros below the diagonal.
template <class T>
__device__ void store_inverse(Accumulator<T>& a, int i, int j, int k, T* F, Index ld) {
    constexpr int E = EDGE<T>;
#pragma unroll
    for (int r = 0; r < E; ++r)
#pragma unroll
        for (int c = 0; c < E; ++c) {
            const int row = i * E + r, column = j * E + c;
            if (row >= k || column >= k) continue;
            F[column * ld + row] = a[r][c];
            if (i > j) F[row * ld + column] = T(0);
        }
}

// S <- the symmetric matrix of whose lower triangle `a` is tile (i, j).
template <class T>
__device__ void store_symmetric(const Accumulator<T>& a, int i, int j, int k, T* S, Index ld) {
    constexpr int E = EDGE<T>;
#pragma unroll
    for (int r = 0; r < E; ++r)
#pragma unroll
        for (int c = 0; c < E; ++c) {
            const int row = i * E + r, column = j * E + c;
            if (row < k && column <= row) S[row * ld + column] = S[column * ld + row] = a[r][c];
        }
}

// Outputs of a factorisation, as of Factors.
template <class T>
struct Outputs {
    Batch<T> C, F, shifted;
    T* scale;
    const int* before;
    int* used;
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
        if (threadIdx.x == 0) out.used[b] = before;
        return;
    }
    if (out.shifted.data != nullptr) store_symmetric<T>(a, i, j, k, out.shifted[b], out.shifted.ld);
    const auto board = Board<T>::make();
    T scale = 1, shift = 0, most = 0;
    if (kind == SEMIDEFINITE) {
        for (int c = threadIdx.x % 32; c < k; c += 32) most = max(most, N.at(b, c, c));
        most = warp_max(most);
        scale = scale_of(most);
        most *= scale;
    }
    int raised = 0;
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
        if (attempt > 0) break;
        raised = *board.raised;  // written before the barriers of the last step
        if (kind != SEMIDEFINITE || raised == 0) break;
        shift = shift_of(most, pivots.floor);
        __syncthreads();  // before anybody writes what others still read
    }
    if (threadIdx.x == 0) {
        out.used[b] = before | (raised == 0 ? 0 : kind == SEMIDEFINITE ? SHIFTED : RAISED);
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
    corner_kernel(Batch<T> N, Batch<T> F, const T* diagonal, Index across, int k, Pivots<T> pivots, int mark, int* used,
                  Active active) {
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
    if (threadIdx.x == 0 && *board.raised != 0) used[b] |= mark;
    store_inverse<T>(a, i, j, k, F[b], F.ld);
}

// Before the blocks of a matrix are factored: C <- the lower triangle of scale N, zeros above; F <- zeros, or what
// settles; the diagonal, and the other outputs. AGAIN: of the matrices whose bit SHIFTED is set, with the shift.
template <class T>
__global__ void __launch_bounds__(THREADS)
    load_kernel(Batch<const T> N, Outputs<T> out, T* diagonal, int k, Kind kind, T noise, bool again) {
    const int b = blockIdx.z;
    if (again && (out.used[b] & SHIFTED) == 0) return;
    const int before = out.before == nullptr ? 0 : out.before[b];
    const bool settles = kind == SETTLE && (before & RAISED) == 0;
    T scale = 1, shift = 0;
    if (kind == SEMIDEFINITE) {
        T most = 0;
        for (int c = threadIdx.x % 32; c < k; c += 32) most = max(most, N[b][c * N.ld + c]);
        most = warp_max(most);
        scale = scale_of(most);
        if (again) shift = shift_of(most * scale, noise);
    }
    if (!again && blockIdx.x == 0 && threadIdx.x == 0) {
        out.used[b] = before;
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
        blocks(Active{out.before, kind == SETTLE ? RAISED : 0});
        if (kind != SEMIDEFINITE) return;
        load(N.first, true);
        blocks(Active{out.used, SHIFTED});
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

    void blocks(Active active) const {
        constexpr int S = BLOCK<T>;
        const Batch<T> C = out.C, F = out.F;
        const int mark = kind == SEMIDEFINITE ? SHIFTED : RAISED;
        for (int j = 0; j < k; j += S) {
            const int width = std::min(S, k - j), rest = k - j - width;
            const Batch<T> corner = F.from(j, invert ? j : 0);
            launch(corner_kernel<T>, dim3(1, 1, batch), FACTOR_THREADS, FACTOR_SHARED<T>, stream, C.from(j, j), corner,
                   diagonal + j, Index(k), width, pivots, mark, out.used, active);
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
