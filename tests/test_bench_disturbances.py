"""The benchmark of disturbed gradients: what it multiplies and counts, its rows, its table and its exit statuses."""

import math

import pytest
import torch
from pandas import DataFrame

from bench import rows
from bench.command import INTERRUPTED
from bench.disturbances import __main__ as disturbances
from bench.disturbances import experts, gpt, steps, tables
from bench.disturbances.forms import FORMS, Form, bounded, paper
from bench.disturbances.steps import Case
from bench.training.sources import open_source
from tests.experiments import MICRO

MUON, ADAMW = Form("muon"), Form("adamw")
BRIEF = {"case": "spike", "value": "7 times", "metric": "first step", "unit": "usual steps"}


class Gradients(torch.optim.SGD):
    """Each step is the gradient, so that what the weight got can be read off."""


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(Form, "build", lambda self, weights, lr, **settings: Gradients(weights, lr))


def test_gradients_are_multiplied_where_a_case_says_so_and_steps_counted_from_there(plain):
    case = Case("spike", "", (2, 3), (100.0,), scale=0.5)
    each, finite = steps.run(case, MUON)
    generator = torch.Generator().manual_seed(steps.SEED)
    expected = [0.5 * torch.randn(2, 3, generator=generator) for _ in case.every]
    expected[steps.BEFORE] *= 100
    torch.testing.assert_close(each, torch.stack(expected).norm(dim=2).double())
    usual = each.norm(dim=1)[steps.BEFORE - steps.AFTER : steps.BEFORE].mean()
    found = steps.figures(case, MUON)
    assert finite and found["first step"] == (float(each[steps.BEFORE].norm() / usual), "usual steps")
    following = each[steps.BEFORE + 1 :].norm(dim=1)
    assert len(following) == steps.AFTER
    assert found["largest of the next 30"][0] == pytest.approx(float(following.max() / usual))


def test_a_silent_row_is_the_first_alone_and_what_counts_is_its_return(plain):
    case = Case("row", "", (2, 3), (0.0,) * 4, returning=True, rows=1)
    each, _ = steps.run(case, MUON)
    silent = each[steps.BEFORE : steps.BEFORE + 4]
    assert not silent[:, 0].any() and silent[:, 1].all() and each[case.start :].all()
    assert len(each) == case.start + 1 + steps.AFTER
    own = float(each[case.start, 0] / each[steps.BEFORE - steps.AFTER : steps.BEFORE, 0].mean())
    assert steps.figures(case, MUON)["row's first step"] == (pytest.approx(own), "usual steps")


def test_another_scale_for_good_is_as_usual_when_it_stays_so(monkeypatch):
    sizes = torch.tensor([1.0] * steps.BEFORE + [3.0, 1.0, 1.2, 1.05, 0.95])[:, None].double()
    monkeypatch.setattr(steps, "run", lambda *given, **settings: (sizes, True))
    case = Case("scale", "", (1, 1), (2.0,) * 5, lasting=True)
    found = steps.figures(case, MUON)
    assert found["largest step"][0] == pytest.approx(3) and found["as usual again after"] == (3, "steps")
    sizes[-1] = 2
    assert math.isnan(steps.figures(case, MUON)["as usual again after"][0])


@pytest.mark.parametrize(("step", "finite"), [(math.nan, True), (1.0, False)])
def test_what_is_not_finite_is_infinite(step, finite, monkeypatch):
    sizes = torch.tensor([1.0] * steps.BEFORE + [1.0, step])[:, None].double()
    monkeypatch.setattr(steps, "run", lambda *given, **settings: (sizes, finite))
    assert steps.figures(Case("spike", "", (1, 1), (2.0,)), MUON)["largest of the next 30"][0] == math.inf


def test_experts_without_tokens_have_gradients_of_zero_and_stay_where_they_are(monkeypatch):
    seen = []

    class Watched(Gradients):
        def step(self):
            seen.append([p.grad.flatten(1).any(dim=1) for group in self.param_groups for p in group["params"]])

    monkeypatch.setattr(Form, "build", lambda self, weights, lr, rank: Watched(weights, lr))
    found = experts.losses(ADAMW, before=1, idle=1, after=1)
    half = experts.EXPERTS // 2
    for layer in range(2):
        before, idle, after = (step[layer] for step in seen)
        assert before.all() and after.all() and idle[:half].all() and not idle[half:].any()
    assert len(found) == 3 and experts.losses(MUON, before=1, idle=1, after=1) == pytest.approx(found)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the gradient of the optimizer " * 200)
    return open_source(path, MICRO.config.context)


@pytest.mark.parametrize("form", [MUON, bounded("pro-klshampoo"), paper("kl-shampoo")], ids=str)
def test_every_gradient_of_a_model_is_disturbed_in_its_step(form, source):
    seen = []

    def factor(name, step):
        seen.append((step, name))
        return 0.0

    still = gpt.validation_loss(form, factor, source, MICRO)
    assert sorted({step for step, _ in seen}) == list(range(MICRO.steps))
    assert len(seen) == len(set(seen)) and (0, "blocks.0.q_proj.weight") in seen and (0, "embedding.weight") in seen
    assert still == gpt.validation_loss(ADAMW, lambda name, step: 0.0, source, MICRO)  # nobody has moved
    assert still != gpt.validation_loss(form, lambda name, step: 1.0, source, MICRO)


def test_a_model_is_trained_with_the_bound_of_its_form_or_without(source, monkeypatch):
    found = []
    finish = gpt.Run.records
    monkeypatch.setattr(gpt.Run, "records", lambda run: found.append(run.trainees[0].optimizers[0]) or finish(run))
    for form in (bounded("pro-klshampoo"), paper("pro-klshampoo")):
        gpt.validation_loss(form, lambda name, step: 1.0, source, MICRO)
    for optimizer, threshold in zip(found, (5.0, None), strict=True):
        assert {g["clip_threshold"] for g in optimizer.param_groups if g["algorithm"] == "matrix"} == {threshold}


def test_a_diverged_run_has_an_infinite_loss(source):
    factor = {True: math.inf, False: 1.0}
    assert gpt.validation_loss(ADAMW, lambda name, step: factor[step == 0], source, MICRO) == math.inf


@pytest.fixture
def quick(monkeypatch):
    """Cases that take no time, and a machine that has a commit."""

    def measure(case):
        return lambda form: iter([form.row(case, "7 times", "first step", "usual steps", 1.5)])

    monkeypatch.setattr(disturbances, "CASES", {name: measure(name) for name in disturbances.CASES})
    here = {column: "x" for column in rows.SAME} | {"date": "2000-01-01"}
    monkeypatch.setattr(rows, "environment", lambda device: here)


def test_cases_are_written_by_form_and_not_measured_again(quick, tmp_path, capsys):
    out = tmp_path / "disturbances.csv"
    assert disturbances.main(["--cases", "spike", "zeros", "--out", str(out)]) == 0
    found = rows.read(out)
    assert [r["case"] for r in found] == ["spike"] * len(FORMS) + ["zeros"] * len(FORMS)
    assert [Form(r["optimizer"], r["clip_threshold"]) for r in found[: len(FORMS)]] == list(FORMS)
    assert {(r["median"], r["commit"]) for r in found} == {("1.5", "x")}
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "spike 7 times pro-klshampoo clip_threshold=5 first step: 1.5 usual steps"
    assert disturbances.main(["--cases", "spike", "row", "--out", str(out)]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("spike: in ") and again[1].startswith("row 7 times")
    assert disturbances.main(["--cases", "spike", "--again", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == said[: len(FORMS)]


def test_ctrl_c_ends_with_its_status_and_keeps_the_cases_that_are_done(quick, tmp_path, capsys, monkeypatch):
    def interrupt(form):
        raise KeyboardInterrupt

    monkeypatch.setitem(disturbances.CASES, "zeros", interrupt)
    out = tmp_path / "disturbances.csv"
    assert disturbances.main(["--out", str(out)]) == INTERRUPTED
    assert {r["case"] for r in rows.read(out)} == {"spike"} and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cases", "nonsense"], "nonsense"),
        (["--cases", "spike", "spike"], "--cases names one twice"),
        (["--cases"], "--cases has no value"),
        (["--out", "."], "--out .: must be a file"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, says, quick, capsys):
    assert disturbances.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_the_table_has_the_largest_of_both_metrics_and_the_papers_form_in_parentheses():
    figures = {bounded("pro-klshampoo"): (1.25, 2.5), paper("pro-klshampoo"): (12345.0, math.inf), MUON: (1.0, 0.5)}
    found = DataFrame(
        form.row("spike", "7 times", metric, "usual steps", figure)
        for form in FORMS
        for metric, figure in zip(("first step", "largest of the next 30"), figures.get(form, (1.0, 1.0)), strict=True)
    )
    header, _, line = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables.steps_table(found).splitlines()
    )
    assert header[:2] == ["case", "Pro-KLShampoo"] and header[-2:] == ["Muon", "AdamW"]
    assert line[:3] == ["one gradient larger, 7 times", "2.50 (not finite)", "1.00 (1.00)"] and line[-2] == "1.00"


@pytest.mark.parametrize(
    ("figure", "digits", "text"),
    [
        (math.nan, 2, "-"),
        (math.inf, 2, "not finite"),
        (0.5, 2, "0.50"),
        (12.34, 2, "12.3"),
        (12345.6, 2, "12,346"),
        (6.7e11, 2, "7e11"),
        (14.0, 0, "14"),
    ],
)
def test_figures_are_as_long_as_they_are_telling(figure, digits, text):
    assert tables.short(figure, digits) == text
