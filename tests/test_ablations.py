"""``bench.ablations``: a variant changes what it says and nothing else."""

import math
import pickle
from functools import partial

import pytest
import torch

from bench import rows
from bench.ablations import __main__ as ablations
from bench.ablations import disturbed, experts, language, studies
from bench.ablations.disturbed import Case, Form
from bench.ablations.studies import EXPERTS, STUDIES, Study, Unit, changed
from bench.study.lengths import FORMS
from bench.study.scales import TINY
from bench.training.run import Run
from bench.training.sources import open_source
from tests.experiments import HYPERS, MICRO, processes_as_threads, text_in

MUON, ADAMW = Form("muon"), Form("adamw")
LOSS = "validation loss"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_in(tmp_path_factory.mktemp("text"))


# The command


def test_a_stopped_study_goes_on_and_trains_nothing_twice(tmp_path, monkeypatch):
    ran = []

    def figures(value, x, seed):
        ran.append((value, seed))
        yield {"metric": "validation loss", "unit": "nats", "median": x + seed}

    def units(seeds):
        for seed in seeds:
            for value, x in (("usual", 1), ("other", 2)):
                key = {"model": "m", "value": value, "seed": seed}
                yield Unit(key, partial(figures, value, x, seed))

    monkeypatch.setitem(STUDIES, "digits", Study("", units, (0, 1)))
    arguments = ["digits", "--out", str(tmp_path)]
    with processes_as_threads():
        assert ablations.main([*arguments, "--seeds", "1"]) == 0 and ablations.main(arguments) == 0
    assert ran == [(value, seed) for seed in (1, 0) for value in ("usual", "other")]
    found = rows.read(tmp_path / "digits.csv")
    assert [(r["value"], r["seed"], r["median"]) for r in found] == [
        ("usual", "1", "2"), ("other", "1", "3"), ("usual", "0", "1"), ("other", "0", "2"),
    ]  # fmt: skip
    assert {(r["model"], r["threads"], r["device"]) for r in found} == {("m", "1", "cpu")}


def test_rows_are_known_by_the_studies_own_keys():
    """A study would train what is recorded."""
    for name, study in STUDIES.items():
        recorded = rows.read(rows.RESULTS / f"{name}.csv")
        assert rows.having(recorded, next(study.units(study.seeds)).key), name
        assert set(recorded[0]) <= rows.COLUMNS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "of", "metrics"),
    [
        ("robustness", {"optimizer": "muon", "value": EXPERTS}, ("training loss",)),
        ("robustness", {"optimizer": "muon", "value": "loss × 1e3"}, (LOSS,)),
        ("digits", {"optimizer": "muon", "value": "1"}, ("test loss", "test errors")),
        ("disturbances", {"optimizer": "kl-shampoo", "clip_threshold": "none", "case": "spikes"}, (LOSS,)),
    ],
    ids=str,
)
def test_every_study_trains_and_its_runs_travel(study, of, metrics, monkeypatch):
    monkeypatch.setattr(studies, "STEPS", 21)
    (unit,) = (unit for unit in STUDIES[study].units((0,)) if of.items() <= unit.key.items())
    found = pickle.loads(pickle.dumps(unit))()
    assert {row["metric"] for row in found} == {*metrics} and all(math.isfinite(row["median"]) for row in found)
    assert all(of.items() <= row.items() and (row["seed"], row["steps"]) == (0, 21) for row in found)


# What variants change


CHANGED = {  # what of a run each case changes, beside the usual one
    "lr × 1/2": {"lr": 0.01},
    "batch × 4": {"batch": 16},
    "loss × 1e-3": {"gradient": 1e-3},
    "width 192": {"width": 192, "heads": 12, "mlp_width": 512, "gradient": None},
    "projections start at zero": {"zero": True, "gradient": None},
    "rank 4": {"rank": 4},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_case_changes_what_it_says_and_nothing_else(name, monkeypatch, text):
    """The figures are of the run before its first step and of its first gradient; None: other weights have another."""

    def look(case):
        seen = {}

        def stop(run):
            run.loss(*(part[:1] for part in run.validation[0])).backward()
            weights, group = dict(run.model.named_parameters()), run.optimizers[0].param_groups[0]
            config = run.model.config
            seen.update(lr=group["lr"], rank=group["rank"], batch=run.scale.batch)
            seen.update(width=config.width, heads=config.heads, mlp_width=config.mlp_width)
            projections = weights["blocks.0.o_proj.weight"], weights["blocks.3.down_proj.weight"]
            seen["zero"] = not any(W.any() for W in projections)
            seen["gradient"] = float(weights["embedding.weight"].grad.norm())
            raise KeyboardInterrupt

        monkeypatch.setattr(Run, "advance", stop)
        monkeypatch.setattr(language, "open_source", lambda data, context: open_source(text, context))
        with pytest.raises(KeyboardInterrupt):
            next(language.figures(TINY["llama-tiny"], FORMS["pro-klshampoo"].default, 0, 1, settings[case]))
        return seen

    settings = changed("pro-klshampoo")
    usual, own = look("as it is"), look(name)
    expected = usual | CHANGED[name]
    factor = CHANGED[name].get("gradient", 1.0)
    expected["gradient"] = own["gradient"] if factor is None else pytest.approx(usual["gradient"] * factor, rel=1e-5)
    assert own == expected and own != usual


@pytest.mark.parametrize("key", ["muon", "pro"])
def test_every_gradient_of_a_model_is_disturbed_in_its_step(key, text):
    seen = []

    def factor(name, step):
        seen.append((step, name))
        return 0.0

    still = language.train(MICRO, HYPERS[key], 0, {"factor": factor}, data=text).record.final_loss
    assert sorted({step for step, _ in seen}) == list(range(MICRO.steps))
    assert len(seen) == len(set(seen)) and (0, "blocks.0.q_proj.weight") in seen and (0, "embedding.weight") in seen
    assert language.train(MICRO, HYPERS[key], 0, {}, data=text).record.final_loss != still


# Disturbances


class Gradients(torch.optim.SGD):
    """Each step is the gradient, so that what the weight got can be read off."""


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(Form, "build", lambda self, weights, lr, rank=None, **settings: Gradients(weights, lr))


def test_gradients_are_scaled_from_the_step_that_a_case_names(plain):
    case = Case("row", "", (2, 3), (100.0,) * 4, returning=True, rows=1, scale=0.5)
    each, finite = disturbed.run(case, MUON)
    generator = torch.Generator().manual_seed(disturbed.SEED)
    expected = torch.stack([0.5 * torch.randn(2, 3, generator=generator) for _ in case.every])
    expected[disturbed.BEFORE : disturbed.BEFORE + 4, :1] *= 100
    torch.testing.assert_close(each, expected.norm(dim=2).double())
    found, usual = disturbed.figures(case, MUON), slice(disturbed.BEFORE - disturbed.AFTER, disturbed.BEFORE)
    for of, name in ((each[:, :1], "row's "), (each, "")):
        steps = of.norm(dim=1) / of.norm(dim=1)[usual].mean()
        after = found[f"{name}largest of the next 30"], found[f"{name}first step"]
        assert finite and after == tuple(
            (pytest.approx(float(step)), "usual steps") for step in (steps[case.start + 1 :].max(), steps[case.start])
        )


def test_another_scale_for_good_is_as_usual_when_it_stays_so(monkeypatch):
    sizes = torch.tensor([1.0] * disturbed.BEFORE + [3.0, 1.0, 1.2, 1.05, 0.95])[:, None].double()
    monkeypatch.setattr(disturbed, "run", lambda *given, **settings: (sizes, True))
    case = Case("scale", "", (1, 1), (2.0,) * 5, lasting=True)
    found = disturbed.figures(case, MUON)
    assert found["largest step"][0] == pytest.approx(3) and found["as usual again after"] == (3, "steps")
    sizes[-1] = 2
    assert math.isnan(disturbed.figures(case, MUON)["as usual again after"][0])
    sizes[-2] = math.nan
    assert disturbed.figures(Case("spike", "", (1, 1), (2.0,)), MUON)["largest of the next 30"][0] == math.inf


def test_experts_without_tokens_stay_where_they_are(monkeypatch):
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
