"""Diagnostics read a live optimizer, name its matrices, agree with the step to come, and leave it alone."""

import math

import pytest
import torch
from torch import nn

import prokl
from prokl import diagnostics
from prokl.diagnostics import report
from tests.inputs import KL, METHODS, NAN, PRO, ForbidHostReads, forbid_host_reads, normal, step, weight
from tests.problems import gradient_stream, run
from tests.training import contents, differences

SHAPES = [(6, 10), (10, 6), (3, 6, 10), (8, 8), (5, 2, 3, 3)]
NAMES = ["group0.0", "group0.1", "group0.2[0]", "group0.2[1]", "group0.2[2]", "group0.3", "group0.4"]
both_methods = pytest.mark.parametrize("cls, kwargs", [(PRO, {"rank": 3}), (KL, {})])
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
@both_methods
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


@both_methods
def test_there_is_nothing_to_tell_before_the_first_step(cls, kwargs):
    p = weight(6, 10)
    optimizer = cls([("p", p)], **kwargs)
    found = (optimizer.clipped, optimizer.skipped, *(lambda f=f: f(optimizer) for f in READERS))
    assert [f() for f in found] == [{}] * len(found)
    step(optimizer, [p], [normal(6, 10)])
    assert optimizer.clipped() == optimizer.skipped() == {"p": 0} and all(f() for f in found)


@both_methods
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
        assert diagnostics.health(optimizer, given).worst["prokl/spread_L_worst"] == name
    hidden.grad = None
    assert diagnostics.health(PRO([hidden], rank=2), model).worst["prokl/without_gradient"] == "1.weight"


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
@both_methods
def test_half_precision_weights_and_state(cls, kwargs, dtype, state_dtype):
    stream = gradient_stream(SHAPES, 4, dtype=torch.float32)
    _, optimizer = run(cls, stream, dtype=dtype, state_dtype=state_dtype, **kwargs)
    found, health = diagnostics.scalars(optimizer), diagnostics.health(optimizer)
    assert all(torch.tensor(value).isfinite() for value in (*found.values(), *health.numbers.values()))
    assert not [words for words in health.words if "orthogonality" in words or "finite" in words]
    Q = next(iter(matrices(optimizer).values()))["Q_L"].float()
    expected = float((Q.mT @ Q - torch.eye(len(Q))).norm())
    # In float32 from the stored values, which are float32 in either case: 6 x 6 sums of 6 products.
    assert found["prokl/group0.0/orthogonality_Q_L"] == pytest.approx(expected, abs=1e-5)
    assert expected < 1e-5


@both_methods
def test_nothing_of_the_run_changes(cls, kwargs):
    stream = gradient_stream(SHAPES, 13)

    def observed(t, parameters, optimizer):
        before, gradients = contents(optimizer), [p.grad.clone() for p in parameters]
        for function in (*READERS, diagnostics.health):
            function(optimizer)
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


def test_another_model_optimizer_or_rank_is_refused():
    _, optimizer = run(PRO, gradient_stream([(4, 9)], 3), rank=2)
    adamw = torch.optim.AdamW([weight(2, 2)])
    for function in (*READERS, diagnostics.health):
        with pytest.raises(ValueError, match="Invalid model: parameter 0 of group 0 is not in it; pass the"):
            function(optimizer, model=nn.Linear(9, 4))
        for other in (adamw, Wrapped(adamw)):
            with pytest.raises(TypeError, match="must be a prokl.ProKLShampoo or prokl.KLShampoo, got AdamW; pass the"):
                function(other)
    for rank in (0, 8.5, "8", None):
        with pytest.raises(ValueError, match=f'Invalid rank={rank!r}: must be "auto" or an integer of at least 1'):
            diagnostics.spectra(optimizer, rank=rank)


def test_a_trainer_s_wrapper_gives_the_figures_of_what_is_inside():
    _, optimizer = run(PRO, gradient_stream(SHAPES, 4), rank=3)
    outer = Wrapped(Wrapped(optimizer))
    assert len(diagnostics.scalars(optimizer)) > 10
    for function in READERS:
        torch.testing.assert_close(function(outer), function(optimizer), rtol=0, atol=0, equal_nan=True)
    assert diagnostics.health(outer) == diagnostics.health(optimizer)


def test_the_tail_of_kl_shampoo_begins_at_the_default_rank():
    _, optimizer = run(KL, gradient_stream([(12, 30)], 4))
    (found,), (own,) = diagnostics.spectra(optimizer).values(), diagnostics.spectra(optimizer, rank=2).values()
    assert all(torch.equal(found[factor], own[factor]) for factor in ("L", "R"))


# The coming update, in float64


SOME_SHAPES = [(6, 10), (10, 6), (3, 6, 10), (8, 8), (4, 30)]
every_method = pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)


def moves(optimizer, parameters, gradients):
    """Diagnostics before a step, and the direction (W - W') / lr of that step by matrix."""
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    found = diagnostics.scalars(optimizer)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    directions = {}
    for i, (p, old) in enumerate(zip(parameters, before, strict=True)):
        D = (old - p.detach()) / optimizer.param_groups[0]["lr"]
        directions |= {f"group0.{i}[{b}]": D[b] for b in range(len(D))} if D.ndim == 3 else {f"group0.{i}": D}
    return found, directions


@pytest.mark.parametrize(
    "cls, kwargs",
    [
        *METHODS.values(),
        (PRO, {"rank": 3, "maximize": True, "backend": "reference"}),
        (PRO, {"rank": 3, "adjust_lr_fn": "match_rms_adamw"}),
    ],
    ids=[*METHODS, "maximize", "AdamW's units"],
)
def test_sizes_of_the_update_are_those_of_the_step_that_follows(cls, kwargs):
    stream = gradient_stream(SOME_SHAPES, 14)
    parameters, optimizer = run(cls, stream[:4], lr=0.5, **kwargs)
    for gradients in stream[4:]:  # a refresh among them
        found, directions = moves(optimizer, parameters, gradients)
        for name, D in directions.items():
            # (W - W') / lr has lost what W's rounding, 1e-16, takes from a direction of 1e-2 and more.
            assert found[f"prokl/{name}/update_rms"] == pytest.approx(float(D.square().mean().sqrt()), rel=1e-9)
        assert all(math.isfinite(value) for value in found.values())


def test_a_gradient_wider_than_its_weight_is_not_rounded():
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.zeros(6, 10, dtype=dtype))
        p.grad_dtype, optimizer = None, PRO([p], rank=2)
        for call in range(4):
            p.grad = 10 * normal(6, 1) @ normal(1, 10, seed=1) + 0.01 * normal(6, 10, seed=2 + call)
            if call < 3:
                optimizer.step()
        found.append(diagnostics.scalars(optimizer))
    assert found[1] == pytest.approx(found[0], rel=2**-8)  # of the weight: stochastic rounding to 8 bits


SMALL_SQUARES = (1.0, 1.0, 1.0, 1.0, 1e-26)  # of the last one no float32


@pytest.mark.parametrize(
    "cls, kwargs, sizes, tolerance",
    [
        (PRO, {"rank": 3, "alpha_kl": 1.0, "lr": 0.5}, (1e-4, 1.0), 1e-9),  # the step bounds what outgrows its start
        (PRO, {"rank": 3}, SMALL_SQUARES, 1e-6),
        (KL, {}, SMALL_SQUARES, 1e-6),
    ],
)
def test_an_oversized_gradient_has_the_figure_of_its_step(cls, kwargs, sizes, tolerance):
    stream = [[size * g] for size, (g,) in zip(sizes, gradient_stream([(6, 10)], len(sizes)), strict=True)]
    parameters, optimizer = run(cls, stream[:-1], **kwargs)
    found, directions = moves(optimizer, parameters, stream[-1])
    rms = float(directions["group0.0"].square().mean().sqrt())
    assert rms > 0 and found["prokl/group0.0/update_rms"] == pytest.approx(rms, rel=tolerance)


@pytest.mark.parametrize("bounded", [True, False])
@every_method
def test_a_matrix_that_will_not_move_is_not_said_to(cls, kwargs, bounded):
    """A zero gradient under a bound moves nothing, momentum or not; one that is not finite stops its whole stack."""
    (experts,), optimizer = run(
        cls, gradient_stream([(3, 6, 10)], 4), **kwargs, **({} if bounded else {"clip_threshold": None})
    )
    names = [f"group0.0[{b}]" for b in range(3)]
    idle = gradient_stream([(3, 6, 10)], 5)[-1][0]
    idle[0] = 0
    found, directions = moves(optimizer, [experts], [idle])
    for name in names:
        assert (found[f"prokl/{name}/update_rms"] > 0) == bool(directions[name].any()), name
    assert bool(directions[names[0]].any()) != bounded
    torn = idle.clone()
    torn[0, 0, 0] = torch.nan
    found, directions = moves(optimizer, [experts], [torn])
    for name in names:
        assert math.isnan(found[f"prokl/{name}/update_rms"]) and not directions[name].any()


def test_rounding_of_a_stored_basis_counts_as_no_update():
    generator = torch.Generator().manual_seed(3)
    rows = torch.linalg.qr(torch.randn(64, 2, generator=generator)).Q.T
    weight = torch.nn.Parameter(torch.zeros(32, 64))
    optimizer = PRO([weight], lr=1.0, rank=2, state_dtype=torch.bfloat16)
    for t in range(12):
        weight.grad = torch.randn(32, 2, generator=generator) @ rows
        before = weight.detach().clone()
        found = diagnostics.scalars(optimizer) if t else {}
        optimizer.step()
        moved = float((weight.detach() - before).square().mean().sqrt())
        if t:
            assert found["prokl/group0.0/update_rms"] == pytest.approx(moved, rel=1e-4)  # of float32 weights of size 1


@both_methods
def test_whitened_size_says_what_the_step_is_about_to_bound(cls, kwargs):
    (p,), optimizer = run(cls, gradient_stream([(6, 10)], 40), **kwargs)
    name, sizes = "prokl/group0.0", []
    for factor in (1.0, 3.0, 1e3):
        p.grad = factor * gradient_stream([(6, 10)], 41)[-1][0]
        sizes.append(diagnostics.scalars(optimizer)[f"{name}/whitened_size"])
    assert sizes[1:] == pytest.approx([3 * sizes[0], 1e3 * sizes[0]], rel=1e-9)
    assert 0.2 < sizes[0] < 5 < sizes[2]
    before = diagnostics.scalars(optimizer)[f"{name}/clipped"]
    optimizer.step()
    assert diagnostics.scalars(optimizer)[f"{name}/clipped"] == before + 1


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_captured_energy_is_the_subspaces_share_of_the_gradient(share):
    (p,), optimizer = run(PRO, gradient_stream([(6, 10)], 5), rank=3)
    U = optimizer.state[p]["U"]
    inside, outside = normal(6, 10, dtype=torch.float64), normal(6, 10, seed=1, dtype=torch.float64)
    inside, outside = inside @ U @ U.mT, outside - outside @ U @ U.mT
    p.grad = (share / inside.square().sum()) ** 0.5 * inside + ((1 - share) / outside.square().sum()) ** 0.5 * outside
    found = diagnostics.scalars(optimizer)
    assert found["prokl/group0.0/captured_energy"] == pytest.approx(share, abs=1e-12)


def test_missing_gradients_have_no_figures_and_bad_ones_nan():
    weights = [weight(4, 6, dtype=torch.float64) for _ in range(3)]
    optimizer = PRO(weights, rank=2)
    for seed in range(2):
        step(optimizer, weights, [normal(4, 6, seed=seed + 10 * i, dtype=torch.float64) for i in range(3)])
    weights[0].grad = None
    weights[1].grad[2, 3] = NAN
    found = diagnostics.scalars(optimizer)
    figures = ("captured_energy", "update_rms", "subspace_share", "whitened_size")
    assert not any(f"prokl/group0.0/{figure}" in found for figure in figures)
    assert all(math.isnan(found[f"prokl/group0.1/{figure}"]) for figure in figures)
    assert all(math.isfinite(found[f"prokl/group0.2/{figure}"]) for figure in figures)
    assert all(f"prokl/group0.{i}/orthogonality_U" in found for i in range(3))


@every_method
@pytest.mark.parametrize("function", [diagnostics.scalars, diagnostics.spectra, diagnostics.health])
def test_the_device_is_waited_for_once(cls, kwargs, function, monkeypatch):
    """Everything is launched before the one place in which results are copied to the host."""
    forbid_host_reads(monkeypatch)
    stream = gradient_stream(SOME_SHAPES, 3, dtype=torch.float32)
    _, optimizer = run(cls, stream, dtype=torch.float32, **kwargs)
    copies, reading = [], report.on_host

    class Finished(Exception):
        pass

    def copied(found):
        copies.append(len(found))
        raise Finished

    monkeypatch.setattr(report, "on_host", copied)
    with pytest.raises(Finished), ForbidHostReads():
        function(optimizer)
    with ForbidHostReads():
        diagnostics.phi(optimizer)
    monkeypatch.setattr(report, "on_host", lambda found: copies.append(len(found)) or reading(found))
    assert function(optimizer) and len(copies) == 2
