// What the binding calls; no CUDA here, so that any C++ compiler takes it.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace prokl {

// `batch` matrices of n rows and k columns.
struct Size {
    int batch, n, k;
};

// Device memory of row-major matrices: elements from one to the next, and from one row to the next.
struct Matrices {
    void* data;
    long long stride, ld;
};

// Where a call leaves its verdicts, (batch) each, and what it works with.
struct Call {
    int* state;
    float* orthogonality;
    void* workspace;  // workspace_bytes<T>(size), aligned to 16 bytes
    void* stream;
};

// Defined for float and double. They enqueue kernels and return; std::runtime_error tells of a launch that failed.
template <class T>
size_t workspace_bytes(Size size);
template <class T>
void qr(Size size, Matrices A, Matrices Q, Call call);
template <class T>
void tracking_qr(Size size, Matrices V, Matrices K, Matrices U, Matrices Q, Call call);
template <class T>
void semidefinite_qr(Size size, Matrices S, Matrices Q, Call call);

// Bytes of shared memory that each kernel's launches ask for at most, columns up to 4096.
template <class T>
std::vector<std::pair<std::string, size_t>> shared_memory();

// CUDA's version that was built with and the newest that the driver knows, as 1000 major + 10 minor; 0 without a driver.
int built_with();
int driver_knows();

}  // namespace prokl
