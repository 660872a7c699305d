"""An optimizer beside the transcription of its method, in float64: they have to agree at every step.

Errors are relative, in the Frobenius norm: of the weights against the distance they have moved, of the state against
the tensor itself.
"""

import torch

from prokl.algorithm.reference import in_weight_coordinates
from tests.inputs import KL, PRO, normal
from tests.problems import gradient_stream, largest
from tests.transcription import KLTranscription, ProTranscription, column_signs, relative_error, with_signs

TOLERANCE = 1e-9
"""Measured with torch 2.13 on a CPU: at most 1.3e-11 on either path, in the weights or any state tensor, and mostly
1e-14; a Newton-Schulz step multiplies the rounding of small singular values by 3.4."""


def sequences(shapes, count, **given):
    """Return `count` gradients of each shape, whose noise keeps every factor of full rank and its eigenvalues apart.

    Else the bases would not be unique.
    """
    return [list(own) for own in zip(*gradient_stream(shapes, count, **given), strict=True)]


def errors_of(parameter, state, signs, paper, start):
    """Relative errors of the weight and of each state tensor."""
    distance = float((paper.W - start).norm()) if paper.t else 1.0
    errors = {"W": float((parameter.detach() - paper.W).norm()) / distance}
    expected = paper.oriented_state()
    state = in_weight_coordinates({key: value for key, value in state.items() if isinstance(value, torch.Tensor)})
    turned = with_signs({key: state[key] for key in expected}, signs)
    for key, value in expected.items():
        assert turned[key].shape == value.shape, key
        assert turned[key].dtype == torch.float64, key
        errors[key] = relative_error(turned[key], value) if value.any() else float(turned[key].norm())
    return errors


def follow(cls, backend, gradients, own=None, **settings):
    """Step one optimizer over weights beside their transcriptions, and compare; return these and the optimizer.

    Args:
        gradients: of every weight, a sequence. own: settings of the optimizer alone, as the paper's, which are the
            transcription's defaults. settings: of both.
    """
    starts = [0.1 * normal(*sequence[0].shape, seed=7, dtype=torch.float64) for sequence in gradients]
    papers = [{PRO: ProTranscription, KL: KLTranscription}[cls](start, **settings) for start in starts]
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = cls(parameters, backend=backend, **(own or {}), **settings)
    signs = {}
    for t in range(len(gradients[0])):
        for parameter, sequence in zip(parameters, gradients, strict=True):
            parameter.grad = sequence[t].clone()
        optimizer.step()
        for parameter, paper, start, sequence in zip(parameters, papers, starts, gradients, strict=True):
            state = optimizer.state[parameter]
            if cls is KL and t == 0:  # how the long side's basis is completed is free: the optimizer's own is taken
                assert relative_error(state["Q_R"].mT @ state["Q_R"], torch.eye(max(start.shape))) < 1e-13
                paper.initialise(sequence[0], long_basis=state["Q_R"])
            else:
                paper.step(sequence[t])
            assert int(state["step"]) == paper.t
            if t == 0:
                signs[parameter] = column_signs(state, paper.oriented_state())
            errors = errors_of(parameter, state, signs[parameter], paper, start)
            assert largest(errors.values()) < TOLERANCE, (tuple(start.shape), t, errors)
    return papers, optimizer
