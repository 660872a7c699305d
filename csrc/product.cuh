// Products of the batch on tiles kept in registers, in full precision, with the triangles that a blocked Cholesky
// factorisation has.
#pragma once

#include "common.cuh"

namespace prokl {

constexpr int DEPTH = 8;  // of the slabs of both factors that are in shared memory at a time

template <class T>
constexpr int VECTOR = (EDGE<T> < 16 / int(sizeof(T))) ? EDGE<T> : 16 / int(sizeof(T));
template <class T>
constexpr int PITCH = BLOCK<T> + VECTOR<T>;  // keeps rows of a slab aligned to 16 bytes and off each other's banks
template <class T>
constexpr size_t PRODUCT_SHARED = 2 * DEPTH * PITCH<T> * sizeof(T);

// Elements of a slab to a thread.
template <class T>
constexpr int SHARE = DEPTH * BLOCK<T> / THREADS;

template <class T>
using Accumulator = T[EDGE<T>][EDGE<T>];

// Where element e of thread t (0 to 15) lies along a block's edge: runs of 16 bytes, neighbouring threads' runs side by
// side, so that a warp's vector loads meet no bank twice.
template <class T>
__device__ __forceinline__ int place(int t, int e) {
    return e / VECTOR<T> * (16 * VECTOR<T>) + t * VECTOR<T> + e % VECTOR<T>;
}

// One factor of a product: element (i, d), i along the block's edge and d along the depth, is data[i ld + d] if DEEP and
// data[d ld + i] otherwise, so that threads side by side read side by side either way.
template <class T, bool DEEP>
struct Factor {
    const T* data;
    int ld;
    int edge;  // elements that exist along the edge

    // The thread's first element of a slab, (i, d); the others follow at STEP along the strided direction.
    static constexpr int STEP = DEEP ? THREADS / DEPTH : THREADS / BLOCK<T>;
    __device__ __forceinline__ int i() const { return DEEP ? threadIdx.x / DEPTH : threadIdx.x % BLOCK<T>; }
    __device__ __forceinline__ int d() const { return DEEP ? threadIdx.x % DEPTH : threadIdx.x / BLOCK<T>; }

    // Where this thread's share of the slab that begins at depth d0 does.
    __device__ __forceinline__ const T* at(int d0) const {
        return data + (DEEP ? Index(i()) * ld + d0 + d() : Index(d0 + d()) * ld + i());
    }

    // The share at `first`, which moves on to the next slab; `left`: the depth from its begin on.
    __device__ __forceinline__ void fetch(T (&share)[SHARE<T>], const T*& first, int left) const {
#pragma unroll
        for (int s = 0; s < SHARE<T>; ++s) {
            const bool exists = DEEP ? i() + s * STEP < edge && d() < left : i() < edge && d() + s * STEP < left;
            share[s] = exists ? first[s * STEP * ld] : T(0);
        }
        first += DEEP ? DEPTH : Index(DEPTH) * ld;
    }

    __device__ __forceinline__ void deposit(const T (&share)[SHARE<T>], T* slab) const {
        T* first = slab + d() * PITCH<T> + i();
#pragma unroll
        for (int s = 0; s < SHARE<T>; ++s) first[s * STEP * (DEEP ? 1 : PITCH<T>)] = share[s];
    }
};

// 16 bytes, which are loaded at once.
template <class T>
struct alignas(sizeof(T) * VECTOR<T>) Vector {
    T element[VECTOR<T>];
};

// sum[i][j] += sum over d in [begin, end) of a(i, d) b(j, d), for the THREADS threads of a block. Ends in a barrier.
template <class T, bool DEEP_A, bool DEEP_B>
__device__ __forceinline__ void accumulate(Accumulator<T>& sum, const Factor<T, DEEP_A>& a, const Factor<T, DEEP_B>& b,
                                           int begin, int end) {
    T* slab_a = dynamic_shared<T>();
    T* slab_b = slab_a + DEPTH * PITCH<T>;
    const auto* rows_a = reinterpret_cast<const Vector<T>*>(slab_a) + threadIdx.x / 16;
    const auto* rows_b = reinterpret_cast<const Vector<T>*>(slab_b) + threadIdx.x % 16;
    T next_a[SHARE<T>], next_b[SHARE<T>];
    const T *first_a = a.at(begin), *first_b = b.at(begin);
    a.fetch(next_a, first_a, end - begin);
    b.fetch(next_b, first_b, end - begin);
    for (int left = end - begin; left > 0;) {
        a.deposit(next_a, slab_a);
        b.deposit(next_b, slab_b);
        __syncthreads();
        left -= DEPTH;
        if (left > 0) {  // on their way while this slab is multiplied
            a.fetch(next_a, first_a, left);
            b.fetch(next_b, first_b, left);
        }
#pragma unroll 2
        for (int d = 0; d < DEPTH; ++d) {
            const Vector<T>* row_a = rows_a + d * (PITCH<T> / VECTOR<T>);
            const Vector<T>* row_b = rows_b + d * (PITCH<T> / VECTOR<T>);
            Vector<T> run_b[EDGE<T> / VECTOR<T>];
#pragma unroll
            for (int j = 0; j < EDGE<T> / VECTOR<T>; ++j) run_b[j] = row_b[16 * j];
#pragma unroll
            for (int i = 0; i < EDGE<T>; ++i) {
                const T element = row_a[i / VECTOR<T> * 16].element[i % VECTOR<T>];
#pragma unroll
                for (int j = 0; j < EDGE<T>; ++j) sum[i][j] += element * run_b[j / VECTOR<T>].element[j % VECTOR<T>];
            }
        }
        __syncthreads();
    }
}

// For each element (row, column) of this thread's share of a block, with its value.
template <class T, class Body>
__device__ __forceinline__ void for_each(Accumulator<T>& sum, const Body& body) {
#pragma unroll
    for (int i = 0; i < EDGE<T>; ++i)
#pragma unroll
        for (int j = 0; j < EDGE<T>; ++j)
            body(place<T>(threadIdx.x / 16, i), place<T>(threadIdx.x % 16, j), sum[i][j]);
}

// Row I and column J <= I of a lower triangle's block number `block`, counted by rows.
__device__ __forceinline__ void lower_block(int block, int& I, int& J) {
    I = static_cast<int>((sqrtf(8.0f * block + 1.0f) - 1.0f) / 2.0f);
    while (I * (I + 1) / 2 > block) --I;  // the root is rounded
    while ((I + 1) * (I + 2) / 2 <= block) ++I;
    J = block - I * (I + 1) / 2;
}

inline int lower_blocks(int blocks) { return blocks * (blocks + 1) / 2; }

// out = A F by row blocks, for A (B,n,k) and upper triangular F (B,k,k), which is read no further. out may be A: a block
// reads its own rows only, and goes through the columns from the last, which none of the earlier ones needs.
template <class T>
__global__ void __launch_bounds__(THREADS, 2)
    apply_kernel(Batch<const T> A, Batch<T> out, Batch<const T> F, int n, int k, Active active) {
    const int b = blockIdx.z;
    if (!active(b)) return;
    const int rows = min(BLOCK<T>, n - static_cast<int>(blockIdx.x) * BLOCK<T>);
    const Index first = Index(blockIdx.x) * BLOCK<T>;
    const Factor<T, true> left{A[b] + first * A.ld, static_cast<int>(A.ld), rows};
    for (int column = (k - 1) / BLOCK<T> * BLOCK<T>; column >= 0; column -= BLOCK<T>) {
        Accumulator<T> sum = {};
        const Factor<T, false> right{F[b] + column, static_cast<int>(F.ld), k - column};
        accumulate<T>(sum, left, right, 0, min(k, column + BLOCK<T>));
        T* to = out[b] + first * out.ld + column;
        const int ld = static_cast<int>(out.ld);
        for_each<T>(sum, [&](int i, int j, T value) {
            if (i < rows && j < k - column) to[i * ld + j] = value;
        });
    }
}

// out -= P P^T for P (B,p,BLOCK) and the lower triangle of out (B,p,p).
template <class T>
__global__ void __launch_bounds__(THREADS, 2) outer_kernel(Batch<const T> P, Batch<T> out, int p, Active active) {
    const int b = blockIdx.z;
    if (!active(b)) return;
    int I, J;
    lower_block(blockIdx.x, I, J);
    const int rows = p - I * BLOCK<T>, columns = p - J * BLOCK<T>;
    Accumulator<T> sum = {};
    const Factor<T, true> left{P[b] + I * BLOCK<T> * P.ld, static_cast<int>(P.ld), rows};
    const Factor<T, true> right{P[b] + J * BLOCK<T> * P.ld, static_cast<int>(P.ld), columns};
    accumulate<T>(sum, left, right, 0, BLOCK<T>);
    T* to = out[b] + I * BLOCK<T> * out.ld + J * BLOCK<T>;
    const int ld = static_cast<int>(out.ld);
    for_each<T>(sum, [&](int i, int j, T value) {
        if (i >= rows || j >= columns || j - i > columns - rows) return;  // above the diagonal nothing is kept
        to[i * ld + j] -= value;
    });
}

// out = -(F R^T) corner: a block of columns of C^-T from those before it, F (B,above,above) upper triangular, C's rows
// R (B,width,above) and the block's own inverse, corner (B,width,width) upper triangular.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
    inverse_kernel(Batch<const T> F, Batch<const T> R, Batch<const T> corner, Batch<T> out, int above, int width,
                   Active active) {
    const int b = blockIdx.z;
    if (!active(b)) return;
    const int first = blockIdx.x * BLOCK<T>, rows = min(BLOCK<T>, above - first);
    T* to = out[b] + first * out.ld;
    const int ld = static_cast<int>(out.ld);
    Accumulator<T> sum = {}, product = {};
    const Factor<T, true> left{F[b] + first * F.ld, static_cast<int>(F.ld), rows};
    const Factor<T, true> right{R[b], static_cast<int>(R.ld), width};
    accumulate<T>(sum, left, right, first, above);
    for_each<T>(sum, [&](int i, int j, T value) {
        if (i < rows && j < width) to[i * ld + j] = -value;
    });
    __syncthreads();  // what this block has just stored is the left factor now
    const Factor<T, true> own{to, ld, rows};
    const Factor<T, false> triangle{corner[b], static_cast<int>(corner.ld), width};
    accumulate<T>(product, own, triangle, 0, width);
    for_each<T>(product, [&](int i, int j, T value) {
        if (i < rows && j < width) to[i * ld + j] = value;
    });
}

}  // namespace prokl
