// A block of threads that factors up to BLOCK columns and inverts the factor: tiles in registers.
#pragma once

#include <cmath>

#include "interface.h"
#include "product.cuh"

namespace prokl {

constexpr int FACTOR_THREADS = 160;  // one to each of the 136 lower tiles of 16 x 16, in whole warps

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

// The shared memory of a factorisation's threads.
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

}  // namespace prokl
