"""Eigenvalues of the preconditioners, read from the live optimizer state."""

from torch import Tensor, nn
from torch.optim import Optimizer

# What an optimizer keeps (an inverse square root per eigenvalue) and the factor it belongs to.
_FACTORS = {"inv_sqrt_lambda_L": "L", "inv_sqrt_lambda_R": "R", "inv_sqrt_lambda_S": "S", "inv_sqrt_mu": "mu"}


def eigenvalues(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, dict[str, Tensor]]:
    """Descending eigenvalues of each matrix's factors: {parameter name: {"L": (m,), "R": (n,)}}.

    L belongs to the weight's short side. Pro-KLShampoo gives "S", (r,), and "mu", (1,), in the place of "R".
    Parameters without eigenvalues (AdamW's, or a matrix before its first gradient) are left out.
    """
    found = {}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            factors = {
                factor: state[key].detach().double().flatten().pow(-2).sort(descending=True).values.cpu()
                for key, factor in _FACTORS.items()
                if key in state
            }
            # A matrix whose gradients were all zero so far has state, but no eigenvalues yet.
            if factors and all(values.isfinite().all() for values in factors.values()):
                found[name] = factors
    return found


def state_bytes(optimizers: list[Optimizer]) -> int:
    """Bytes of all tensors that the optimizers keep per parameter."""
    return sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
