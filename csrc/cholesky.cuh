// Cholesky factorisation with the triangular inverse: one block of threads for up to BLOCK columns, blocked beyond.
#pragma once

#include "product.cuh"

namespace prokl {

constexpr int FACTOR_THREADS = 160;  // one to each of the 136 lower tiles of 16 x 16, in whole warps

template <class T>
constexpr size_t FACTOR_SHARED = (EDGE<T> * EDGE<T> + 2 * BLOCK<T> * EDGE<T>) * sizeof(T) + 16;

// A pivot below `floor` times the matrix's diagonal there is rounding noise and becomes `raised` times it.
template <class T>
struct Pivots {
    T floor, raised;
};

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

// N = C C^T and F = C^-T (upper, zeros below) for the lower triangle of N (B,k,k), k <= BLOCK, whose original diagonal
// is at b * diagonal_stride; the state tells of raised pivots. KEEP: C replaces N, zeros above.
//
// Factor and inverse in one sweep over the tiles' columns: thread (i, j), i >= j, holds tile (i, j) of N until column j
// is done, and tile (i, j) of C^-1 from then on; either is updated once in every step.
template <class T, bool KEEP>
__global__ void __launch_bounds__(FACTOR_THREADS) factor_kernel(Batch<T> N, Batch<T> F, const T* diagonal,
                                                                Index diagonal_stride, int k, Pivots<T> pivots, int* state,
                                                                Active active) {
    constexpr int E = EDGE<T>;
    const int b = blockIdx.z;
    if (!active(b)) return;
    T* corner = dynamic_shared<T>();      // inverse of the tile on the diagonal, E x E
    T* panel = corner + E * E;            // column p of C below the diagonal, BLOCK x E
    T* final_row = panel + BLOCK<T> * E;  // row p of C^-1, E x BLOCK
    int* any_raised = reinterpret_cast<int*>(final_row + BLOCK<T> * E);
    if (threadIdx.x == 0) *any_raised = 0;

    int i, j;
    lower_block(threadIdx.x, i, j);
    const int steps = (k + E - 1) / E;
    const bool mine = i < steps;  // also false for the threads beyond the triangle
    const int row0 = i * E, column0 = j * E;
    T* block = N[b];
    Accumulator<T> a;
#pragma unroll
    for (int r = 0; r < E; ++r)
#pragma unroll
        for (int c = 0; c < E; ++c) {
            const int row = row0 + r, column = column0 + c;
            const bool exists = mine && row < k && column <= row;
            a[r][c] = exists ? block[row * N.ld + column] : T(row == column ? 1 : 0);
        }

    for (int p = 0; p < steps; ++p) {
        if (mine && i == p && j == p) {
            Accumulator<T> x;
            if (factor_tile<T>(a, x, diagonal + b * diagonal_stride + row0, k - row0, pivots)) *any_raised = 1;
#pragma unroll
            for (int r = 0; r < E; ++r)
#pragma unroll
                for (int c = 0; c < E; ++c) {
                    if (KEEP && row0 + r < k && row0 + c < k)
                        block[(row0 + r) * N.ld + row0 + c] = c <= r ? a[r][c] : T(0);
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
                    if (KEEP && row0 + r < k) block[(row0 + r) * N.ld + column0 + c] = out[c];
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
    if (threadIdx.x == 0 && *any_raised) state[b] |= RAISED;  // set before the barriers of the last step
    if (!mine) return;
    T* to = F[b];
#pragma unroll
    for (int r = 0; r < E; ++r)
#pragma unroll
        for (int c = 0; c < E; ++c) {
            const int row = row0 + r, column = column0 + c;
            if (row >= k || column >= k) continue;
            to[column * F.ld + row] = a[r][c];
            if (i > j) to[row * F.ld + column] = T(0);
        }
}

template <class T>
void apply(Batch<const T> A, Batch<T> out, Batch<const T> F, int n, int k, int batch, Active active,
           cudaStream_t stream) {
    launch(apply_kernel<T, true>, dim3(ceil_div(n, BLOCK<T>), 1, batch), THREADS, PRODUCT_SHARED<T>, stream, A, out, F,
           Index(0), k, Runs::of(n, n), active);
}

// N = C C^T for the lower triangle of N (B,k,k), which C's replaces off the diagonal blocks (KEEP: all of C, the upper
// blocks must be zero before), and C^-T's diagonal blocks in F; all of F (B,k,k) with `invert`, upper blocks only.
template <class T, bool KEEP>
void factor(Batch<T> N, Batch<T> F, const T* diagonal, int k, Pivots<T> pivots, bool invert, int batch, int* state,
            Active active, cudaStream_t stream) {
    constexpr int S = BLOCK<T>;
    for (int j = 0; j < k; j += S) {
        const int width = std::min(S, k - j), rest = k - j - width;
        launch(factor_kernel<T, KEEP>, dim3(1, 1, batch), FACTOR_THREADS, FACTOR_SHARED<T>, stream, N.from(j, j),
               F.from(j, j), diagonal + j, Index(k), width, pivots, state, active);
        if (rest == 0) break;
        const Batch<T> below = N.from(j + S, j);
        apply<T>(below, below, F.from(j, j), rest, S, batch, active, stream);
        launch(outer_kernel<T, true>, dim3(lower_blocks(ceil_div(rest, S)), 1, batch), THREADS, PRODUCT_SHARED<T>,
               stream, below, below, N.from(j + S, j + S), rest, rest, S, active);
    }
    if (!invert) return;
    for (int i = S; i < k; i += S) {  // F's block column i above the diagonal is -(F_<i C_i,<i^T) F_ii
        const int width = std::min(S, k - i);
        const Batch<T> column = F.from(0, i);
        launch(outer_kernel<T, false>, dim3(i / S, 1, batch), THREADS, PRODUCT_SHARED<T>, stream, F, N.from(i, 0),
               column, i, width, i, active);
        apply<T>(column, column, F.from(i, i), i, width, batch, active, stream);
    }
}

}  // namespace prokl
