"""Every form of the batched QR that there is, by operation, for tests that put the same problems to all of them."""

from functools import partial

import pytest
import torch

from prokl.algorithm import qr
from prokl.algorithm.algebra import Algebra
from prokl.backends import cuda_qr


def pieces(V, K, U):
    """Return the inputs of track in their place: V = alpha G_perp^T Y + U K."""
    rest = V.double() - U.double() @ K.double()
    eye = torch.eye(K.shape[-1], dtype=K.dtype, device=K.device).expand_as(K)
    return rest.mT.to(V.dtype), eye, K, U, 1.0


def products_on(device):
    if device.type != "cuda":
        return Algebra(host_readable=False)
    from prokl.backends.triton_ops import TritonAlgebra

    return TritonAlgebra(use_cuda_qr=True, host_readable=False)


def track(V, K, U):
    return cuda_qr.track(products_on(V.device), *pieces(V, K, U))


def refresh(L):
    return cuda_qr.semidefinite_qr(products_on(L.device), L)


def coordinates(S, Q):
    return cuda_qr.coordinates_qr(products_on(S.device), S, Q)


def forms_of(operation, extension):
    """PyTorch's form, as on a CPU and as where the host may not read, and the extension's."""
    return {
        "torch on a host": partial(operation, Algebra(host_readable=True)),
        "torch on a device": partial(operation, Algebra(host_readable=False)),
        "extension": lambda *inputs: extension(*inputs).Q,
    }


FORMS = {
    "qr": {"householder": qr.householder_qr, "extension": lambda A: cuda_qr.qr(A).Q},
    "tracking": forms_of(lambda ops, *inputs: ops.track(*pieces(*inputs)), track),
    "refresh": forms_of(lambda ops, L: ops.semidefinite_qr(L)[0], refresh),
    "coordinates": forms_of(Algebra.coordinates_qr, coordinates),
}
"""Functions from an operation's inputs to Q."""
EVERY_FORM = [(operation, form) for operation, forms in FORMS.items() for form in forms]


@pytest.fixture
def form_of(request):
    """(operation, form) -> its function, with what it needs in place."""

    def prepared(operation, name):
        if name == "extension":
            request.getfixturevalue("extension_on_cpu")
        return FORMS[operation][name]

    return prepared


def words(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.replace(", ", "-").replace(" ", "-") if isinstance(value, str) else "x".join(map(str, value))
