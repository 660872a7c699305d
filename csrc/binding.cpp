// prokl._C: addresses and sizes in, kernels enqueued. Tensors, their checks and their memory are Python's affair
// (prokl/backends/cuda_qr.py), so that building this needs no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>

#include "interface.h"

namespace {

using Address = std::uintptr_t;
using Tensor = std::tuple<Address, long long, long long>;  // data, or 0 for none; stride, leading dimension
using Parts = std::tuple<Tensor, int, long long>;          // the first of a sum, how many, how far apart

prokl::Matrices matrices(const Tensor& tensor) {
    return {reinterpret_cast<void*>(std::get<0>(tensor)), std::get<1>(tensor), std::get<2>(tensor)};
}

prokl::Sums sums(const Parts& parts) { return {matrices(std::get<0>(parts)), std::get<1>(parts), std::get<2>(parts)}; }

template <class P>
P* at(Address address) {
    return reinterpret_cast<P*>(address);
}

template <class T>
void bind(pybind11::module_& m) {
    m.attr("block") = prokl::block_columns<T>();
    m.def("factor", [](int batch, int k, Parts N, int kind, Tensor C, Tensor F, bool invert, Tensor shifted,
                       Address scale, Address diagonal, Address before, Address status, Address stream) {
        prokl::factor<T>(batch, k, sums(N), static_cast<prokl::Kind>(kind),
                         {matrices(C), matrices(F), invert, matrices(shifted), at<void>(scale), at<void>(diagonal),
                          at<int>(status)},
                         at<const int>(before), at<void>(stream));
    });
    m.def("finish", [](int batch, int n, int k, Tensor A, Parts N, Tensor kept, Tensor Q, bool of_root,
                       Address work, Address before, Address status, Address stream) {
        prokl::finish<T>(batch, n, k, matrices(A), sums(N), matrices(kept), matrices(Q), of_root, at<void>(work),
                         at<const int>(before), at<int>(status), at<void>(stream));
    });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Parts of a batched QR on CUDA; use prokl.cuda_qr.";
    m.attr("architectures") = PROKL_CUDA_ARCHS;
    auto single = m.def_submodule("float32");
    bind<float>(single);
    auto twice = m.def_submodule("float64");
    bind<double>(twice);
}
