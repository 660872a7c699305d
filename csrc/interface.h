// The functions that the binding calls; no CUDA here, so that any C++ compiler takes it.
#pragma once

#include <cstddef>

namespace prokl {

// Device memory of row-major matrices: elements from one to the next, and from one row to the next. nullptr: none.
struct Matrices {
    void* data;
    long long stride, ld;
};

// A sum of `parts` matrices, so many elements apart.
struct Sums {
    Matrices first;
    int parts;
    long long apart;
};

enum Kind : int {
    PASS,          // of Cholesky QR: N is the Gram matrix of the columns, and what is lost in it is lost
    SETTLE,        // likewise, of columns that a pass has made nearly orthonormal unless `before` has a raised pivot
    SEMIDEFINITE,  // N is factored for its own sake: scaled, and shifted where it is singular
};

// The outputs of a factorisation; each but `status` may be missing.
struct Factors {
    Matrices C;  // lower, zeros above; with more than BLOCK columns what works in the place of N
    Matrices F;  // C^-T, zeros below; without `invert` a strip (B,k,BLOCK) of its diagonal blocks
    bool invert;
    Matrices shifted;  // N + shift I, not scaled
    void* scale;       // (B): N times that was factored
    void* diagonal;    // (B,k), with more than BLOCK columns: to work with
    int* status;       // (B)
};

// Defined for float and double, of `batch` matrices of n rows and k columns. They enqueue kernels and return;
// std::runtime_error tells of a launch that failed.
// `before` (B): what has been done to a matrix up to here, or nullptr for nothing.
template <class T>
void factor(int batch, int k, Sums N, Kind kind, Factors factors, const int* before, void* stream);
// `of_root`: Q is of a product with the root C that `before` tells of, and no Q of A's where that is none.
// `work` (B,2 k + k / 64 rounded up), or nullptr where columns are few enough for shared memory: to work with.
template <class T>
void finish(int batch, int n, int k, Matrices A, Sums N, Matrices kept, Matrices Q, bool of_root, void* work,
            const int* before, int* status, void* stream);

// Columns that one block of threads factors.
template <class T>
int block_columns();

}  // namespace prokl
