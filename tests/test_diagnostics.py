"""Diagnostics read the state of a live optimizer, name it, and leave it alone."""

import pytest
import torch
from torch import nn

import prokl
from prokl import diagnostics
from tests.inputs import KL, PRO, normal, step, weight
from tests.problems import gradient_stream, run
from tests.training import contents, differences

SHAPES = [(6, 10), (10, 6), (3, 6, 10), (8, 8), (5, 2, 3, 3)]
NAMES = ["group0.0", "group0.1", "group0.2[0]", "group0.2[1]", "group0.2[2]", "group0.3", "group0.4"]
METHODS = [(PRO, {"rank": 3}), (KL, {})]
READERS = (diagnostics.scalars, diagnostics.spectra, diagnostics.phi)
BASES = {PRO: ("U", "Q_L"), KL: ("Q_L", "Q_R")}


def matrices(optimizer):
    """{name of diagnostics: state of that one matrix} for weights without names in one group."""
    found = {}
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        for b in range(p.shape[0] if p.ndim == 3 else 1):
            own = {k: v for k, v in optimizer.state[p].items() if k not in ("step", "skipped")}
            name = f"group0.{i}[{b}]" if p.ndim == 3 else f"group0.{i}"
            found[name] = {k: v[b] if p.ndim == 3 else v for k, v in own.items()}
    return found


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_figures_of_the_state_follow_from_every_matrix(cls, kwargs, backend):
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    shapes, steps = (SHAPES, 4) if backend != "triton" else (SHAPES[:2], 2)
    stream = [[g.to(device) for g in gs] for gs in gradient_stream(shapes, steps)]
    _, optimizer = run(cls, stream, backend=backend, **kwargs)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["Q_L"][0, 0] += 0.25
    states = matrices(optimizer)
    for rank in (3, 6, 100):  # of KL-Shampoo's factors; Pro-KLShampoo has its own, 3
        spectra = diagnostics.spectra(optimizer, rank=rank)
        found = diagnostics.scalars(optimizer)
        assert sorted(spectra) == sorted(states)
        for name, state in states.items():
            assert_follows_from(
                {k: v.cpu().double() for k, v in state.items()},
                BASES[cls],
                3 if cls is PRO else rank,
                spectra[name],
                {key.rpartition("/")[2]: value for key, value in found.items() if key.startswith(f"prokl/{name}/")},
            )
    assert found["prokl/group0.0/orthogonality_Q_L"] > 0.2


def assert_follows_from(state, bases, rank, spectra, figures):
    """Compare what is said of a matrix with its state."""
    m, n = state["M_Q"].shape
    expected = {key.rpartition("_")[2]: state[key].reshape(-1).pow(-2) for key in state if key.startswith("inv_sqrt")}
    assert spectra.keys() == expected.keys() - {"mu"}
    for factor, spectrum in spectra.items():
        values = expected[factor].sort(descending=True).values
        start = min(rank, m, n - 1)
        unit = expected["mu"] if factor == "S" else values[start:].mean() if len(values) > start else values[-1]
        torch.testing.assert_close(spectrum, values / unit, rtol=1e-12, atol=0)
    for key in bases:
        gram = state[key].mT @ state[key]
        assert figures[f"orthogonality_{key}"] == pytest.approx(float((gram - torch.eye(len(gram))).norm()), abs=1e-14)
    assert figures["spread_L"] == pytest.approx(float(expected["L"].max() / expected["L"].min()), rel=1e-12)


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_there_is_nothing_to_tell_before_the_first_step(cls, kwargs):
    p = weight(6, 10)
    optimizer = cls([("p", p)], **kwargs)
    found = (optimizer.clipped, optimizer.skipped, *(lambda f=f: f(optimizer) for f in READERS))
    assert [f() for f in found] == [{}] * len(found)
    step(optimizer, [p], [normal(6, 10)])
    assert optimizer.clipped() == optimizer.skipped() == {"p": 0} and all(f() for f in found)


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_phi_is_the_whitened_second_moment_of_the_gradients(cls, kwargs):
    stream = gradient_stream(SHAPES, 4)
    parameters, optimizer = run(cls, stream, **kwargs)
    parameters[1].grad = None
    found = diagnostics.phi(optimizer)
    assert sorted(found) == [name for name in NAMES if name != "group0.1"]
    for name, state in matrices(optimizer).items():
        if name in found:
            L = state["Q_L"] @ state["inv_sqrt_lambda_L"].pow(-2).diag() @ state["Q_L"].mT
            i, b = int(name[7]), int(name[9]) if "[" in name else 0
            G = parameters[i].grad.reshape(-1, *state["M_Q"].shape)[b]
            expected = G.mT @ torch.linalg.solve(L, G)
            assert (found[name] - expected).norm() < 1e-10 * expected.norm()


def test_names_are_the_optimizers_then_the_models_then_places():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 7))
    groups = prokl.param_groups(model, lr=0.01, adamw_lr=0.01, rank=2)
    hidden, ids = model[1].weight, torch.arange(7)
    for optimizer, given, name in (
        (PRO(groups), None, "1.weight"),
        (PRO([hidden], rank=2), model, "1.weight"),
        (PRO([{"params": [model[2].weight]}, {"params": [hidden]}], rank=2), None, "group1.0"),
    ):
        for _ in range(2):
            model.zero_grad()
            model(ids).square().mean().backward()
            model[2].weight.grad = None
            optimizer.step()
        assert set(diagnostics.spectra(optimizer, given)) == {name}  # and nothing of AdamW's
        assert {key.rpartition("/")[0] for key in diagnostics.scalars(optimizer, given)} == {f"prokl/{name}"}


def test_what_has_not_begun_is_left_out():
    ones, stack, later = weight(4, 6), weight(3, 4, 6), weight(5, 5)
    optimizer = PRO([ones, stack, later], rank=2)
    assert diagnostics.scalars(optimizer) == {} and diagnostics.spectra(optimizer) == {}
    g = normal(3, 4, 6)
    g[1] = 0
    for _ in range(3):
        step(optimizer, [ones, stack, later], [torch.zeros(4, 6), g, None])
    assert set(diagnostics.spectra(optimizer)) == {"group0.1[0]", "group0.1[2]"}
    found = diagnostics.scalars(optimizer)
    assert {key.split("/")[1] for key in found} == {"group0.1[0]", "group0.1[2]"}
    assert 0 < found["prokl/group0.1[2]/captured_energy"] < 1


@pytest.mark.parametrize("dtype, state_dtype", [(torch.bfloat16, None), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_half_precision_weights_and_state(cls, kwargs, dtype, state_dtype):
    stream = gradient_stream(SHAPES, 4, dtype=torch.float32)
    _, optimizer = run(cls, stream, dtype=dtype, state_dtype=state_dtype, **kwargs)
    found = diagnostics.scalars(optimizer)
    assert all(torch.tensor(value).isfinite() for value in found.values())
    Q = next(iter(matrices(optimizer).values()))["Q_L"].float()
    expected = float((Q.mT @ Q - torch.eye(len(Q))).norm())
    # In float32 from the stored values, which are float32 in either case: 6 x 6 sums of 6 products.
    assert found["prokl/group0.0/orthogonality_Q_L"] == pytest.approx(expected, abs=1e-5)
    assert expected < 1e-5


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_nothing_of_the_run_changes(cls, kwargs):
    stream = gradient_stream(SHAPES, 13)

    def observed(t, parameters, optimizer):
        before, gradients = contents(optimizer), [p.grad.clone() for p in parameters]
        diagnostics.scalars(optimizer)
        diagnostics.spectra(optimizer)
        diagnostics.phi(optimizer)
        assert differences(before, optimizer) == set()
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))

    plain, _ = run(cls, stream, **kwargs)
    watched, _ = run(cls, stream, observe=observed, **kwargs)
    assert all(torch.equal(p, q) for p, q in zip(plain, watched, strict=True))


def test_a_loaded_state_can_be_read_before_the_first_step():
    parameters, optimizer = run(PRO, gradient_stream(SHAPES, 4), rank=3)
    other = PRO([nn.Parameter(p.detach().clone()) for p in parameters], rank=3)
    other.load_state_dict(optimizer.state_dict())
    found, expected = diagnostics.spectra(other), diagnostics.spectra(optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name]["L"], expected[name]["L"]) for name in found)


class Wrapped(torch.optim.Optimizer):
    """A stand-in for a trainer's wrapper: an optimizer by its class, with the one that it was given inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


ALL_FIGURES, RANK_FIGURES = ("scalars", "spectra", "phi"), ("spectra",)
WRONG = {
    "another model": (
        ALL_FIGURES,
        {"model": nn.Linear(9, 4)},
        "Invalid model: parameter 0 of group 0 is not in it; pass the",
    ),
    **{
        f"rank {rank!r}": (
            RANK_FIGURES,
            {"rank": rank},
            f'Invalid rank={rank!r}: must be "auto" or an integer of at least 1',
        )
        for rank in (0, 8.5, "8", None)
    },
}


@pytest.mark.parametrize("functions, options, says", WRONG.values(), ids=WRONG)
def test_what_is_none_of_the_optimizers_is_refused(functions, options, says):
    _, optimizer = run(PRO, gradient_stream([(4, 9)], 3), rank=2)
    for function in functions:
        with pytest.raises(ValueError, match=says):
            getattr(diagnostics, function)(optimizer, **options)


def test_another_optimizer_is_refused():
    adamw = torch.optim.AdamW([weight(2, 2)])
    for function in ALL_FIGURES:
        for other in (adamw, Wrapped(adamw)):
            with pytest.raises(TypeError, match="must be a prokl.ProKLShampoo or prokl.KLShampoo, got AdamW; pass the"):
                getattr(diagnostics, function)(other)


def test_a_trainer_s_wrapper_gives_the_figures_of_what_is_inside():
    _, optimizer = run(PRO, gradient_stream(SHAPES, 4), rank=3)
    outer = Wrapped(Wrapped(optimizer))
    assert len(diagnostics.scalars(optimizer)) > 10
    for function in READERS:
        torch.testing.assert_close(function(outer), function(optimizer), rtol=0, atol=0, equal_nan=True)


def test_the_tail_of_kl_shampoo_begins_at_the_default_rank():
    _, optimizer = run(KL, gradient_stream([(12, 30)], 4))
    (found,), (own,) = diagnostics.spectra(optimizer).values(), diagnostics.spectra(optimizer, rank=2).values()
    assert all(torch.equal(found[factor], own[factor]) for factor in ("L", "R"))


def test_a_tail_that_is_not_there_is_refused():
    values = torch.ones(3)
    for function in (lambda r: diagnostics.tail_am_gm(values, r), lambda r: diagnostics.gap_bound(values, r, 2)):
        for rank in (3, -1):
            with pytest.raises(ValueError, match=f"Invalid rank={rank}: must be an integer from 0 to 2"):
                function(rank)
