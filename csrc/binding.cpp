// prokl._C: addresses and sizes in, kernels enqueued. Tensors, their checks and their memory are Python's affair
// (prokl/cuda_qr.py), so that building this needs no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>

#include "interface.h"

namespace {

using Address = std::uintptr_t;
using Tensor = std::tuple<Address, long long, long long>;  // data, stride, leading dimension

prokl::Matrices matrices(const Tensor& tensor) {
    return {reinterpret_cast<void*>(std::get<0>(tensor)), std::get<1>(tensor), std::get<2>(tensor)};
}

prokl::Call call(Address state, Address orthogonality, Address workspace, Address stream) {
    return {reinterpret_cast<int*>(state), reinterpret_cast<float*>(orthogonality),
            reinterpret_cast<void*>(workspace), reinterpret_cast<void*>(stream)};
}

template <class T>
void bind(pybind11::module_& m) {
    m.def("workspace_bytes",
          [](int batch, int n, int k) { return prokl::workspace_bytes<T>({batch, n, k}); });
    m.def("shared_memory", prokl::shared_memory<T>);
    m.def("qr", [](int batch, int n, int k, Tensor A, Tensor Q, Address state, Address orthogonality,
                   Address workspace, Address stream) {
        prokl::qr<T>({batch, n, k}, matrices(A), matrices(Q), call(state, orthogonality, workspace, stream));
    });
    m.def("tracking_qr", [](int batch, int n, int k, Tensor V, Tensor K, Tensor U, Tensor Q, Address state,
                            Address orthogonality, Address workspace, Address stream) {
        prokl::tracking_qr<T>({batch, n, k}, matrices(V), matrices(K), matrices(U), matrices(Q),
                              call(state, orthogonality, workspace, stream));
    });
    m.def("semidefinite_qr", [](int batch, int n, int k, Tensor S, Tensor Q, Address state, Address orthogonality,
                                Address workspace, Address stream) {
        prokl::semidefinite_qr<T>({batch, n, k}, matrices(S), matrices(Q),
                                  call(state, orthogonality, workspace, stream));
    });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Batched QR on CUDA; use prokl.cuda_qr.";
    m.attr("architectures") = PROKL_CUDA_ARCHS;
    m.def("built_with", prokl::built_with);
    m.def("driver_knows", prokl::driver_knows);
    auto single = m.def_submodule("float32");
    bind<float>(single);
    auto twice = m.def_submodule("float64");
    bind<double>(twice);
}
