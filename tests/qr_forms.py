"""Every form of the batched QR that there is, by operation, for tests that put the same problems to all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from prokl.backends import cuda_qr, qr
from prokl.backends.torch_ops import TorchStages


@dataclass(frozen=True)
class Form:
    function: Callable
    """From the operation's inputs to Q."""
    extension: bool = False


def pieces(V, K, U):
    """What track is given in their place: V = alpha G_perp^T Y + U K."""
    rest = V.double() - U.double() @ K.double()
    eye = torch.eye(K.shape[-1], dtype=K.dtype, device=K.device).expand_as(K)
    return rest.mT.to(V.dtype), eye, K, U, 1.0


def products_on(device):
    """The products of a step there."""
    if device.type != "cuda":
        return TorchStages(host_readable=False)
    from prokl.backends.triton_ops import TritonStages

    return TritonStages(use_cuda_qr=True, host_readable=False)


def track(V, K, U):
    return cuda_qr.track(products_on(V.device), *pieces(V, K, U))


def refresh_basis(L, Q):
    return cuda_qr.refresh_basis(products_on(L.device), L, Q)


def refresh_coordinates(S, Q):
    return cuda_qr.refresh_coordinates(products_on(S.device), S, Q)


def torch_forms(name):
    """PyTorch's primitive of this name, as on a CPU and as where the host may not read."""
    return {
        "torch on a host": Form(getattr(TorchStages(host_readable=True), name)),
        "torch on a device": Form(getattr(TorchStages(host_readable=False), name)),
    }


FORMS = {
    "qr": {
        "householder": Form(qr.householder_qr),
        "extension": Form(lambda A: cuda_qr.qr(A).Q, extension=True),
    },
    "tracking": {
        **torch_forms("tracking_qr"),
        "extension": Form(lambda *inputs: track(*inputs).Q, extension=True),
    },
    "refresh": {
        **torch_forms("refresh_basis"),
        "extension": Form(lambda *inputs: refresh_basis(*inputs).Q, extension=True),
    },
    "coordinates": {
        **torch_forms("refresh_coordinates"),
        "extension": Form(lambda *inputs: refresh_coordinates(*inputs).Q, extension=True),
    },
}
EVERY_FORM = [(operation, form) for operation, forms in FORMS.items() for form in forms]


@pytest.fixture
def form_of(request):
    """(operation, form) -> its function, with what it needs in place."""

    def prepared(operation, name):
        form = FORMS[operation][name]
        if form.extension:
            request.getfixturevalue("extension_on_cpu")
        return form.function

    return prepared


def words(value):
    """A test's name for a parameter."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.replace(", ", "-").replace(" ", "-") if isinstance(value, str) else "x".join(map(str, value))
