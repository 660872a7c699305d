"""Every form of the batched QR that there is, by operation, for tests that put the same problems to all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from prokl.backends import cuda_qr, qr
from prokl.backends.torch_ops import TorchPrimitives


@dataclass(frozen=True)
class Form:
    function: Callable
    """From the operation's inputs to Q."""
    extension: bool = False


def of_symmetric(S):
    return qr.cholesky_refresh(S, torch.eye(S.shape[-1], dtype=S.dtype, device=S.device).expand_as(S))


def torch_forms(name):
    """PyTorch's primitive of this name, as on a CPU and as where the host may not read."""
    return {
        "torch on a host": Form(getattr(TorchPrimitives(host_readable=True), name)),
        "torch on a device": Form(getattr(TorchPrimitives(host_readable=False), name)),
    }


FORMS = {
    "qr": {
        "householder": Form(qr.householder_qr),
        "extension": Form(lambda A: cuda_qr.qr(A).Q, extension=True),
    },
    "tracking": {
        **torch_forms("tracking_qr"),
        "extension": Form(cuda_qr.track, extension=True),
    },
    "semidefinite": {
        "torch": Form(of_symmetric),
        "extension": Form(lambda S: cuda_qr.semidefinite_qr(S).Q, extension=True),
    },
    "refresh": {
        **torch_forms("refresh_basis"),
        "extension": Form(cuda_qr.refresh_basis, extension=True),
    },
    "coordinates": {
        **torch_forms("refresh_coordinates"),
        "extension": Form(cuda_qr.refresh_coordinates, extension=True),
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
