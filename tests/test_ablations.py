"""``bench.ablations``: a variant changes what it says and nothing else."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bench import rows, workers
from bench.ablations import __main__ as ablations
from bench.ablations import disturbed, experts, language
from bench.ablations.disturbed import Case, Form
from bench.ablations.studies import STUDIES, changed, same, tuned
from bench.ablations.study import Study
from bench.study.scales import TINY
from bench.training.run import Run
from bench.training.sources import open_source
from tests.experiments import HYPERS, MICRO

MUON, ADAMW = Form("muon"), Form("adamw")
LOSS = "validation loss"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the gradient of the optimizer " * 200)
    return open_source(path, MICRO.config.context)


# The command


@pytest.fixture
def threads(monkeypatch):
    """The pool's processes as threads, so that what a test has changed is there, too."""
    monkeypatch.setattr(workers, "one_run_each", ThreadPoolExecutor)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick(monkeypatch, threads):
    """A study that takes no time, and its runs."""
    ran = []

    def figures(unit, settings):
        ran.append((unit.optimizer, unit.variant, unit.seed))
        yield {"metric": "validation loss", "unit": "nats", "median": settings["x"] + unit.seed}

    study = Study("", ("m",), ("muon", "adamw"), same({"usual": {"x": 1}, "other": {"x": 2}}), figures, seeds=(0, 1))
    monkeypatch.setitem(STUDIES, "digits", study)
    return ran


def test_a_study_is_trained_once_and_goes_on_where_it_was_stopped(quick, tmp_path, monkeypatch):
    arguments = ["digits", "--out", str(tmp_path), "--optimizers", "muon"]
    assert ablations.main([*arguments, "--seeds", "1"]) == 0 and ablations.main(arguments) == 0
    assert quick == [("muon", v, seed) for seed in (1, 0) for v in ("usual", "other")]
    found = rows.read(tmp_path / "digits.csv")
    assert [(r["value"], r["seed"], r["median"]) for r in found] == [
        ("usual", "1", "2"), ("other", "1", "3"), ("usual", "0", "1"), ("other", "0", "2"),
    ]  # fmt: skip
    assert {(r["model"], r["steps"], r["threads"], r["device"]) for r in found} == {("m", "400", "1", "cpu")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["robustness", "--optimizers", "sgd"], "--optimizers sgd is none of pro-klshampoo, muon"),
        (["robustness", "--variants", "float8"], "--variants float8 is none of as it is, lr × 1/2"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, says, capsys):
    assert ablations.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_rows_are_known_by_the_studies_own_keys():
    """What is recorded is what a study would train: the first model, optimizer, variant and seed of each."""
    for name, study in STUDIES.items():
        recorded = rows.read(rows.RESULTS / f"{name}.csv")
        assert study.known(next(study.units(name)), recorded), name
        assert set(recorded[0]) <= rows.COLUMNS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "arguments", "metrics"),
    [
        ("robustness", ["--variants", "experts of 4 tokens, r = 8"], {"training loss"}),
        ("digits", ["--optimizers", "muon", "--variants", "1"], {"test loss", "test errors"}),
        ("disturbances", ["--variants", "spikes", "--optimizers", "muon", "kl-shampoo none"], {LOSS}),
    ],
)
def test_every_study_trains(study, arguments, metrics, tmp_path, threads):
    assert ablations.main([study, "--seeds", "0", "--steps", "21", "--out", str(tmp_path), *arguments]) == 0
    found = rows.read(tmp_path / f"{study}.csv")
    assert {row["metric"] for row in found} == metrics and all(row["median"] for row in found)


# What variants change


def begun(monkeypatch, source, scale, hyper, settings):
    """The trainee of a variant before its first step, with gradients."""
    seen = []

    def stop(run):
        (trainee,) = run.trainees
        trainee.loss(trainee.model, *run.validation[0]).backward()
        seen.append((run, trainee))
        raise StopIteration

    monkeypatch.setattr(Run, "advance", stop)
    with pytest.raises(StopIteration):
        language.train(scale, hyper, 0, settings, source=source)
    return seen[0]


CHANGED = {  # what of a run each case changes, beside the usual one
    "lr × 1/2": {"lr": 0.5},
    "batch × 4": {"batch": 4.0},
    "loss × 1e-3": {"gradient": 1e-3},
    "width 192": {"width": 2.0},
    "projections start at zero": {"zero": True},
    "rank 4": {"rank": 4},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_case_changes_what_it_says_and_nothing_else(name, monkeypatch, source):
    def look(case):
        settings = dict(changed("llama-tiny", "pro-klshampoo")[case])
        hyper = {key: settings.pop(key) for key in ("lr", "rank") if key in settings}
        own = language.replace(tuned("", "pro-klshampoo"), **hyper)
        run, trainee = begun(monkeypatch, source, TINY["llama-tiny"], own, settings)
        weights, group = dict(trainee.model.named_parameters()), trainee.optimizers[0].param_groups[0]
        assert trainee.peak_lrs[0][0] == group["lr"]
        return {
            "lr": group["lr"],
            "rank": group["rank"],
            "batch": run.settings.batch,
            "width": run.settings.model.width,
            "zero": not weights["blocks.0.o_proj.weight"].any() and not weights["blocks.3.down_proj.weight"].any(),
            "gradient": float(weights["embedding.weight"].grad.norm()),
        }

    usual, own = look("as it is"), look(name)
    for key, factor in CHANGED[name].items():
        expected = usual[key] * factor if isinstance(factor, float) else factor
        assert own[key] == pytest.approx(expected, rel=1e-5) and own[key] != usual[key]
    if "gradient" in CHANGED[name] or not {"zero", "width", "batch"} & CHANGED[name].keys():
        assert own["gradient"] == pytest.approx(usual["gradient"] * CHANGED[name].get("gradient", 1.0), rel=1e-5)
    others = {"lr", "rank", "batch", "width", "zero"} - CHANGED[name].keys()
    assert all(own[key] == usual[key] for key in others)


@pytest.mark.parametrize("key", ["muon", "pro"])
def test_every_gradient_of_a_model_is_disturbed_in_its_step(key, source):
    seen = []

    def factor(name, step):
        seen.append((step, name))
        return 0.0

    still = language.train(MICRO, HYPERS[key], 0, {"factor": factor}, source=source).record.final_loss
    assert sorted({step for step, _ in seen}) == list(range(MICRO.steps))
    assert len(seen) == len(set(seen)) and (0, "blocks.0.q_proj.weight") in seen and (0, "embedding.weight") in seen
    for of, settings, moved in (("kl", {"factor": lambda name, step: 0.0}, False), (key, {}, True)):
        other = language.train(MICRO, HYPERS[of], 0, settings, source=source).record.final_loss
        assert (other != still) is moved


# Disturbances


class Gradients(torch.optim.SGD):
    """Each step is the gradient, so that what the weight got can be read off."""


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(Form, "build", lambda self, weights, lr, rank=None, **settings: Gradients(weights, lr))


def test_gradients_are_multiplied_where_a_case_says_so_and_steps_counted_from_there(plain):
    case = Case("spike", "", (2, 3), (100.0,), scale=0.5)
    each, finite = disturbed.run(case, MUON)
    generator = torch.Generator().manual_seed(disturbed.SEED)
    expected = [0.5 * torch.randn(2, 3, generator=generator) for _ in case.every]
    expected[disturbed.BEFORE] *= 100
    torch.testing.assert_close(each, torch.stack(expected).norm(dim=2).double())
    usual = each.norm(dim=1)[disturbed.BEFORE - disturbed.AFTER : disturbed.BEFORE].mean()
    found = disturbed.figures(case, MUON)
    assert finite and found["first step"] == (float(each[disturbed.BEFORE].norm() / usual), "usual steps")
    assert found["largest of the next 30"][0] == pytest.approx(
        float(each[disturbed.BEFORE + 1 :].norm(dim=1).max() / usual)
    )


def test_a_silent_row_is_the_first_alone_and_what_counts_is_its_return(plain):
    case = Case("row", "", (2, 3), (0.0,) * 4, returning=True, rows=1)
    each, _ = disturbed.run(case, MUON)
    silent = each[disturbed.BEFORE : disturbed.BEFORE + 4]
    assert not silent[:, 0].any() and silent[:, 1].all() and each[case.start :].all()
    own = float(each[case.start, 0] / each[disturbed.BEFORE - disturbed.AFTER : disturbed.BEFORE, 0].mean())
    assert disturbed.figures(case, MUON)["row's first step"] == (pytest.approx(own), "usual steps")


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
