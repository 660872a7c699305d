"""Every form of the batched QR on what training gave them (``python -m tests.capture_factors``), within the bounds.

Conditions of what is factored, by step after the initialising one:

                                       1       10      20      60      100
    V      blocks.0.q_proj    192x32   3.3e3           5.7e2   1.5e2   4.5e1
           blocks.3.o_proj    192x32   3.7e4           2.8e3   1.5e3   3.5e2
           blocks.2.down_proj 768x32   1.6e4                           2.2e2
    L Q_L  blocks.3.o_proj    192x192          6.4e6
           blocks.2.down_proj 192x192                                  5.1e3
    S Q_S  blocks.0.q_proj    32x32            1.9e3           1.5e2   4.5e1
           blocks.3.o_proj    32x32            1.2e4           1.6e3   3.8e2
           blocks.2.down_proj 32x32            5.0e3           4.1e2   2.4e2

Q_S itself has at most 3.0. Reached here in float32, in units of k eps: orthogonality 0.22 to 0.37 (tracking_qr), 0.30
to 0.32 (refresh_basis, cholesky_refresh), 0.35 to 0.44 (refresh_coordinates), backward errors of at most 0.13. Only in
float32: rounded to that, L and S are symmetric and Q_L orthogonal to no more than its precision.
"""

import json

import numpy as np
import pytest
import torch

from bench import pretrain
from bench.training.sources import open_source
from prokl.backends.qr import householder_qr
from tests import capture_factors
from tests.capture_factors import DATA, INPUTS
from tests.qr_bounds import assert_is_qr
from tests.qr_forms import FORMS

OPERATIONS = {"tracking_qr": "tracking", "refresh_basis": "refresh", "refresh_coordinates": "coordinates"}
CAPTURED = [(weight, name, step) for (weight, name), steps in capture_factors.PLAN.items() for step in steps]
CASES = [(*case, form) for case in CAPTURED for form in FORMS[OPERATIONS[case[1]]]]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def arrays():
    with np.load(DATA) as file:
        return dict(file)


def inputs_of(arrays, weight, name, step):
    """(1,n,k) each."""
    return tuple(torch.from_numpy(arrays[f"{step} {weight} {x}"])[None] for x in INPUTS[name])


@pytest.mark.parametrize("weight, name, step, form", CASES)
def test_every_form_is_a_qr_of_what_training_gives_it(weight, name, step, form, arrays, form_of):
    inputs = inputs_of(arrays, weight, name, step)
    assert_is_qr(OPERATIONS[name], inputs, form_of(OPERATIONS[name], form)(*inputs))


@pytest.mark.parametrize("weight, name, step", CAPTURED)
def test_the_inputs_belong_together(weight, name, step, arrays):
    """They are those of one call: a basis that the step has written since would belong to the next."""
    inputs = [t.double() for t in inputs_of(arrays, weight, name, step)]
    k = inputs[-1].shape[-1]
    basis, eye = inputs[-1], torch.eye(k, dtype=torch.float64)
    apart = torch.linalg.matrix_norm(basis.mT @ basis - eye)
    if name == "tracking_qr":
        V, K, U = inputs
        assert apart <= 2 * k * EPS  # measured: 1.1, of the SVD that U starts from
        # Rounding of the products that make V and K; measured: 6 eps.
        assert torch.linalg.matrix_norm(K - U.mT @ V) <= 20 * EPS * torch.linalg.matrix_norm(K)
    else:
        assert apart <= k * EPS if name == "refresh_basis" else apart > 0.01  # measured: 0.6 k eps and 0.04
        values = torch.linalg.eigvalsh(inputs[0])
        assert (values >= -k * EPS * values.max()).all()


def test_the_file_is_what_the_script_would_write_but_for_rounding(arrays):
    about = json.loads(str(arrays["about"]))
    assert {"prokl", "torch", "python", "corpus_sha256", "commit", "seed", "steps", "rank"} <= about.keys()
    wanted = {f"{step} {weight} {x}" for weight, name, step in CAPTURED for x in INPUTS[name]}
    assert arrays.keys() == wanted | {"about"}
    assert {arrays[key].dtype for key in wanted} == {np.dtype("float32")}


def test_what_is_captured_at_one_step_leads_to_the_next(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five six seven " * 40)
    size = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2, "rank": 4, "threads": 1}
    settings = pretrain.Options(optimizers=("pro-klshampoo",), eval_windows=1, **size).settings(curve=False)
    text = open_source(tmp_path / "text.txt", settings.context)
    weight, other = "blocks.0.k_proj.weight", "blocks.0.up_proj.weight"
    plan = {
        (weight, "tracking_qr"): (1, 2),
        (other, "tracking_qr"): (2,),
        (other, "refresh_basis"): (10, 20),
        (other, "refresh_coordinates"): (10,),
    }
    found = {key: torch.from_numpy(t)[None] for key, t in capture_factors.capture(settings, text, plan).items()}
    assert [t.shape[1:] for key, t in found.items() if other in key and key.startswith(("2 ", "10 "))] == [
        (64, 4), (4, 4), (64, 4), (16, 16), (16, 16), (4, 4), (4, 4),
    ]  # fmt: skip
    Q = householder_qr(found[f"1 {weight} V"])
    # The same QR of the same matrix, in a batch then and alone now.
    assert (Q - found[f"2 {weight} U"]).abs().max() <= 1e-5
    Q = householder_qr(found[f"10 {other} L"] @ found[f"10 {other} Q_L"])
    assert (Q - found[f"20 {other} Q_L"]).abs().max() <= 1e-5
