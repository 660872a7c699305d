"""The numbers of a whole optimizer follow from those of its matrices, and the words name what is wrong."""

import math
import re
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import prokl
from prokl import diagnostics
from prokl.diagnostics import summary
from tests.commands import ROOT
from tests.health_runs import CASES, trained
from tests.inputs import NAN, PRO, normal, step, weight
from tests.problems import gradient_stream, run
from tests.test_diagnostics import SHAPES, both_methods

SAYS = {
    "lr × 10": (5, "The coming step moves 9 of 9 matrices by more than 20% of their size, .* by [0-9]+%. Lower lr"),
    "idle rows": (200, "of the gradient's rows or columns are zero in embedding.weight. If it is an embedding, give"),
    "NaN batch": (
        200,
        "Gradients that were not finite since the last call: [0-9]+, 1 each of blocks.0.* Skip steps whose",
    ),
    "another copy": (5, "None of the 12 weights has a gradient, nor has had one. .* was made of other weights"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_words_tell_the_sick_from_the_healthy(name):
    found_at = trained(CASES[name])
    if not CASES[name].sick:
        assert [found.words for found in found_at.values()] == [[]] * len(found_at)
        return
    at, says = SAYS[name]
    assert any(re.search(says, words) for words in found_at[at].words)
    assert all(not found.words for step, found in found_at.items() if step < at and name != "idle rows")


def test_ten_times_the_rate_is_told_beside_zero_weights():
    for sick in ("", "lr"):
        found_at = trained(CASES["gpt2, seed 0"]._replace(sick=sick), asked=(3, 5))
        assert found_at[3].words == []  # by now only weights that started at zero have moved
        assert bool(found_at[5].words) == bool(sick)
    assert found_at[5].words[0].startswith("The coming step moves 8 of 8 matrices by more than 20% of their size, ")


def by_figure(scalars):
    found = {}
    for key, value in scalars.items():
        _, name, figure = key.split("/")
        found.setdefault(figure.partition("_Q")[0].removesuffix("_U"), {}).setdefault(name, []).append(value)
    return found


@both_methods
def test_numbers_are_the_median_and_the_worst_of_the_matrices(cls, kwargs):
    stream = gradient_stream([*SHAPES, (9, 7)], 5)
    stream[-1][1][:3] = 0
    groups = [{"params": []}, {"params": [], "split": 3}]
    parameters = [weight(*g.shape, seed=i, dtype=torch.float64) for i, g in enumerate(stream[0])]
    named = [(f"w{i}", p) for i, p in enumerate(parameters)]
    groups[0]["params"], groups[1]["params"] = named[:-1], named[-1:]
    optimizer = cls(groups, lr=0.3, **kwargs)
    for gradients in stream[:-1]:
        step(optimizer, parameters, gradients)
    for p, g in zip(parameters, stream[-1], strict=True):
        p.grad = g
    found, own = diagnostics.health(optimizer), by_figure(diagnostics.scalars(optimizer))
    assert "w2[1]" in own["spread_L"] and "w5.2" in own["spread_L"]
    for figure in summary.MEDIANS:
        if figure in own:
            expected = median(value for (value,) in own[figure].values())
            assert found.numbers[f"prokl/{figure}_median"] == pytest.approx(expected, rel=1e-12)
    for figure in summary.WORST:
        largest = {name: max(values) for name, values in own[figure].items()}
        key = f"prokl/{figure}_worst"
        assert found.numbers[key] == max(largest.values()) == largest[found.worst[key]]
    assert ("prokl/subspace_share_median" in found.numbers) == (cls is PRO)
    assert len(found.numbers) == 11 + (cls is PRO)
    assert found.numbers["prokl/idle_rows_worst"] == 0.3 and found.worst["prokl/idle_rows_worst"] == "w1"
    assert found.numbers["prokl/without_gradient"] == 0
    shown = str(found).splitlines()
    assert len(shown) == len(found.numbers) + len(found.words) and "w1" in str(found)


@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)])
def test_update_to_weight_is_what_the_coming_step_does(lr):
    (p,), optimizer = run(PRO, gradient_stream([(6, 10)], 3), lr=lr, rank=3)
    p.grad, before = gradient_stream([(6, 10)], 4)[-1][0], p.detach().clone()
    found = diagnostics.health(optimizer).numbers["prokl/update_to_weight_median"]
    optimizer.step()
    # A weight of size 1 has lost 1e-16 of it, an lr in float32 6e-8.
    assert found == pytest.approx(float((p.detach() - before).norm() / before.norm()), rel=1e-7)


def test_the_share_in_the_subspace_is_that_of_the_variants():
    for variant, low, high in (("complement-only", 0, 1e-3), ("subspace-only", 1 - 1e-9, 1 + 1e-9)):
        _, optimizer = run(PRO, gradient_stream([(6, 10)], 4), rank=3, variant=variant)
        assert low <= diagnostics.health(optimizer).numbers["prokl/subspace_share_median"] <= high


def test_a_weight_of_zeros_has_no_update_to_weight():
    (p, _), optimizer = run(PRO, gradient_stream([(6, 10), (6, 10)], 3), rank=3)
    p.detach().zero_()
    for _ in range(2):
        assert math.isinf(diagnostics.scalars(optimizer)["prokl/group0.0/update_to_weight"])
        assert diagnostics.health(optimizer).worst["prokl/update_to_weight_worst"] == "group0.1"
        p.grad.zero_()


@both_methods
def test_counts_are_those_since_the_last_call(cls, kwargs):
    shapes = [(6, 10), (3, 6, 10)]
    stream = gradient_stream(shapes, 40)
    parameters, optimizer = run(cls, stream, **kwargs)
    first = diagnostics.health(optimizer)
    assert first.numbers["prokl/skipped"] == 0
    assert first.numbers["prokl/clipped"] == sum(optimizer.clipped().values()) / (4 * 39)
    larger = [1e3 * stream[-1][0], stream[-1][1].clone()]
    larger[1][0, 0, 0] = NAN
    step(optimizer, parameters, larger)
    found = diagnostics.health(optimizer, since=first)
    assert found.numbers["prokl/clipped"] == 1 / 4 and found.worst["prokl/clipped"] == "group0.0"
    assert found.numbers["prokl/skipped"] == 1 and found.worst["prokl/skipped"] == "group0.1"
    assert any(
        words.startswith("Gradients that were not finite since the last call: 1, most of group0.1.")
        for words in found.words
    )
    assert diagnostics.health(optimizer, since=found).numbers["prokl/skipped"] == 0
    del optimizer.state[parameters[1]]  # begins anew
    for gradients in stream[:3]:
        step(optimizer, parameters, gradients)
    anew = diagnostics.health(optimizer, since=found)
    assert anew.numbers["prokl/skipped"] == 0 and 0 <= anew.numbers["prokl/clipped"] <= 1


def test_before_the_first_step_there_are_only_counts():
    p, q = weight(6, 10), weight(4, 4)
    optimizer = PRO([("p", p), ("q", q)], rank=2)
    p.grad, q.grad = normal(6, 10), normal(4, 4)
    found = diagnostics.health(optimizer)
    assert found.numbers == {"prokl/clipped": 0, "prokl/skipped": 0, "prokl/without_gradient": 0} and not found.words
    optimizer.step()
    assert diagnostics.health(optimizer, since=found).words == []
    optimizer.zero_grad()
    after = diagnostics.health(optimizer)
    assert after.numbers["prokl/without_gradient"] == 2 and "prokl/whitened_size_median" not in after.numbers
    assert after.numbers["prokl/spread_L_median"] >= 1
    assert after.words == [
        "No weight has a gradient, so nothing is known of the update. Call health() between backward() and step()."
    ]


def test_weights_without_a_gradient_are_counted_adamws_too():
    model = nn.ModuleDict({"used": nn.Linear(6, 6), "aside": nn.Linear(6, 4), "frozen": nn.Linear(6, 3)})
    optimizer = PRO(prokl.param_groups(model, lr=0.02, adamw_lr=1e-3, rank=2))
    model["frozen"].requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        model["used"](torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    found = diagnostics.health(optimizer)
    assert found.numbers["prokl/without_gradient"] == 2
    assert found.words == [
        "2 of 4 weights have no gradient (aside.weight, aside.bias) and do not move. Freeze what is not to be trained, "
        "requires_grad_(False); else see why the loss does not depend on it."
    ]


def test_a_matrix_that_never_begins_is_named_later():
    ones, stack, frozen = weight(4, 6), weight(2, 4, 6), weight(4, 6).requires_grad_(False)
    optimizer = PRO([("ones", ones), ("stack", stack), ("frozen", frozen)], rank=2)
    words_at = {}
    for t in range(26):
        ones.grad, stack.grad = torch.zeros(4, 6), normal(2, 4, 6, seed=t)
        stack.grad[1] = 0
        words_at[t] = [words for words in diagnostics.health(optimizer).words if "usable" in words]
        optimizer.step()
    assert not any(words_at[t] for t in range(25))
    (words,) = words_at[25]
    assert words.startswith("ones, stack[1]: none of 25 gradients or more has been usable so far.")


@both_methods
def test_a_non_finite_gradient_is_the_worst_and_in_no_median(cls, kwargs):
    parameters, optimizer = run(cls, gradient_stream([(6, 10), (8, 8), (10, 6)], 4), **kwargs)
    whole = diagnostics.scalars(optimizer)
    parameters[1].grad[0, 0] = NAN
    found = diagnostics.health(optimizer)
    assert math.isnan(found.numbers["prokl/whitened_size_worst"])
    assert found.worst["prokl/whitened_size_worst"] == "group0.1"
    sizes = [whole[f"prokl/group0.{i}/whitened_size"] for i in (0, 2)]
    assert found.numbers["prokl/whitened_size_median"] == pytest.approx(sum(sizes) / 2, rel=1e-12)
    assert found.words[0].startswith("The gradient of group0.1 is not finite, so the coming step leaves it as it is.")


def test_a_bad_basis_and_many_bounded_steps_are_told():
    stream = [
        [1e-18 * 8.0**t * g for g in gradients] for t, gradients in enumerate(gradient_stream([(6, 10), (8, 8)], 27))
    ]
    parameters, optimizer = run(PRO, stream[:24], rank=3)
    assert diagnostics.health(optimizer).words == []  # of 23 steps it is too early to say
    for gradients in stream[24:]:
        step(optimizer, parameters, gradients)
    optimizer.state[parameters[1]]["Q_L"][0, 0] += 0.25
    clipped, basis = diagnostics.health(optimizer).words
    assert clipped.startswith("clip_threshold bounded 100% of the steps since the last call, 26 each of group0.0, gro")
    assert basis.startswith("A basis of group0.1 is off orthogonality by 0.")


DOCUMENT = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "my-run-looks-wrong.md").read_text(encoding="utf-8")


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def linear():
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False)
    return model, PRO(model.parameters(), lr=0.02, rank=2)


def test_what_is_shown_of_health_logs_by_every_logger():
    model, optimizer = linear()
    logged, scalars = {}, {}
    scope = {
        "model": lambda batch: model(batch).square().mean(),
        "loader": [normal(4, 6, seed=t) for t in range(12)],
        "optimizer": optimizer,
        "logger": SimpleNamespace(log=lambda numbers, step: logged.update({step: numbers})),
        "run": SimpleNamespace(log=lambda numbers, step: logged.update({step: numbers})),
        "writer": SimpleNamespace(add_scalar=lambda key, value, step: scalars.update({key: value})),
    }
    loop, wandb, tensorboard = [block for block in blocks(DOCUMENT) if ".health(" in block and "Trainer" not in block]
    exec(loop, scope)
    assert list(logged) == list(range(10)) and "prokl/whitened_size_median" in logged[9]
    exec(wandb, scope | {"step": 12})
    exec(tensorboard, scope | {"step": 12})
    assert logged[12] == scalars


def test_every_number_is_explained():
    model, optimizer = linear()
    for t in range(2):
        optimizer.zero_grad()
        model(normal(4, 6, seed=t)).square().mean().backward()
        optimizer.step()
    for key in diagnostics.health(optimizer).numbers:
        assert f"| `{key.removeprefix('prokl/')}` |" in DOCUMENT


def test_the_pages_loop_skips_a_step_whose_loss_is_nan(capsys):
    ask, skip = blocks(PAGE)
    model, optimizer = linear()
    losses = [1.0, 1.0, NAN, 1.0]
    scope = {"torch": torch, "optimizer": optimizer, "loader": losses}
    scope["model"] = lambda factor: factor * model(torch.ones(2, 6)).square().mean()
    exec(skip, scope)
    assert optimizer.state[model.weight]["step"] == 2 and not any(optimizer.skipped().values())
    model(torch.ones(2, 6)).square().mean().backward()
    exec(ask, scope | {"health": None})
    assert "prokl/clipped" in capsys.readouterr().out


def test_gradients_that_adamw_skipped_are_counted_too():
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 9))
    optimizer = prokl.ProKLShampoo(prokl.param_groups(model, lr=0.02, adamw_lr=3e-3))
    for _ in range(2):
        model(torch.arange(9)).logsumexp(-1).mean().backward()
        model[0].weight.grad[0] = torch.nan
        optimizer.step()
        optimizer.zero_grad()
    health = prokl.diagnostics.health(optimizer)
    assert health.numbers["prokl/skipped"] == 2 and health.worst["prokl/skipped"] == "0.weight" and health.words
