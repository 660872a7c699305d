"""Random cases of tests.fuzz, and the proof that its checks notice what they are there for."""

import pytest
import torch

from prokl.algorithm import admission, algebra, evidence
from prokl.backends import io, qr
from prokl.backends.io import TorchIO
from prokl.backends.torch_ops import TorchAlgebra, TorchStages
from tests import fuzz
from tests.fuzz import examine, main
from tests.fuzz_cases import OTHERS, SIZES, STRUCTURES, draw, gradients

ALL = 100
"""Cases of a test: they notice every break below. The command runs as many as wanted."""


@pytest.mark.slow
@pytest.mark.parametrize("seeds", fuzz.chunks(ALL, 20))
def test_whatever_comes_steps_are_bounded_and_the_state_is_sound(seeds):
    assert fuzz.failures(examine, seeds) == []


FOUND = {
    "float32 cannot hold KL-Shampoo's L": 38513,
    "bfloat16 cannot hold the inverse roots of float64 gradients": 79410,
    "L is of 1e-187": 23774,
    "R is of 1e-218": 58444,
}
"""Of seeds to 100,000 those that once failed."""


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND)
def test_what_was_found_once(seed):
    assert examine(seed) == []


def uncut(patch):
    patch.setattr(evidence, "clip_factor", lambda norm, bound: torch.ones_like(norm))


def unmasked(patch):
    store = TorchIO.store
    everywhere = staticmethod(lambda slots: store([slot._replace(masks=()) for slot in slots]))
    patch.setattr(TorchIO, "store", everywhere)


def unfiltered(patch):
    usable = io.usable

    def of_finite_norms(sq_norm, owner, skipped):
        return usable(torch.where(sq_norm.isfinite(), sq_norm, 1.0), owner, skipped)

    patch.setattr(io, "usable", of_finite_norms)


def without_ceilings(patch):
    patch.setattr(admission, "clipped_ema", lambda s, x, b, limit: algebra.clipped_ema(s, x, b, limit + torch.inf))


def nearly_orthonormal(patch):
    householder = qr.householder_qr
    patch.setattr(qr, "householder_qr", lambda A: householder(A) * 1.001)


def indefinite(patch):
    product = TorchAlgebra.symmetric_product

    def shifted(self, A, /, *, C=None, alpha=1.0, beta=1.0):
        D = product(self, A, C=C, alpha=alpha, beta=beta)
        return D if C is None else D - 1e-3 * D.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] * torch.eye(len(D[0]))

    patch.setattr(TorchAlgebra, "symmetric_product", shifted)


def lopsided(patch):
    product = TorchAlgebra.symmetric_product

    def skewed(self, A, /, *, C=None, alpha=1.0, beta=1.0):
        D = product(self, A, C=C, alpha=alpha, beta=beta)
        return D if C is None else D * (1 + 1e-3 * torch.ones_like(D).triu(1))

    patch.setattr(TorchAlgebra, "symmetric_product", skewed)


def imprecise(patch):
    both = TorchStages.projections
    patch.setattr(TorchStages, "projections", lambda self, *args: tuple(t * (1 + 1e-8) for t in both(self, *args)))


def failing(patch):
    patch.setattr(evidence, "clip_factor", lambda *args: 1 / 0)


@pytest.mark.parametrize(
    "sabotage, complaint",
    [
        (uncut, "moved: "),
        (unmasked, "without a usable gradient, changed entries: "),
        (unfiltered, "not counted as skipped: "),
        (unfiltered, "not finite, entries: "),
        (without_ceilings, "above its ceiling: "),
        (nearly_orthonormal, "not orthonormal: "),
        (indefinite, "not positive semi-definite: "),
        (lopsided, "not symmetric: "),
        (imprecise, "unlike the reference's: "),
        (failing, "raised ZeroDivisionError: "),
    ],
)
def test_a_broken_step_is_noticed(monkeypatch, sabotage, complaint):
    sabotage(monkeypatch)
    assert any(complaint in line for seed in range(100) for line in examine(seed))


def test_a_case_is_its_seed():
    for seed in range(20):
        case, again = draw(seed), draw(seed)
        assert case == again
        for step, same in zip(gradients(case), gradients(again), strict=True):
            for g, h in zip(step, same, strict=True):
                assert (g is None) == (h is None)
                assert g is None or torch.equal(g.nan_to_num(), h.nan_to_num())


def test_cases_reach_every_kind_setting_and_path():
    cases = [draw(seed) for seed in range(1000)]
    assert {kind for case in cases for kind in case.kinds} == {*STRUCTURES, *SIZES, *OTHERS}
    assert len({(case.optimizer, case.settings.get("variant"), case.path) for case in cases}) == 5 * 3
    assert len({(case.dtype, case.settings.get("state_dtype")) for case in cases}) == 4 * 4
    shapes = {shape for case in cases for shape in case.shapes}
    assert {len(shape) for shape in shapes} == {2, 3, 4}
    assert any(rows < cols for rows, cols in (s[-2:] for s in shapes)) and any(s[-2] > s[-1] for s in shapes)
    assert sum(case.unique for case in cases) >= 30


def test_the_command_prints_every_failure_and_a_summary(monkeypatch, capsys):
    said = {8: ["moved: far", "moved: again"], 9: ["moved: too"]}
    monkeypatch.setattr(fuzz, "examine", lambda seed: said.get(seed, []))
    assert main(["--cases", "3", "--first", "7"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[:5] == [str(draw(8)), "    moved: far", "    moved: again", str(draw(9)), "    moved: too"]
    assert out[5].startswith("2 of 3 cases failed") and out[6:] == ["      2  moved"]


def test_the_command_prints_the_summary_so_far_after_ctrl_c(monkeypatch, capsys):
    def examine_two(seed):
        if seed == 2:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(fuzz, "examine", examine_two)
    assert main(["--cases", "10"]) == 130
    assert capsys.readouterr().out.startswith("0 of 2 cases failed")


@pytest.mark.slow
def test_the_command_finds_with_two_processes_what_it_finds_with_one(capsys):
    assert main(["--cases", "3", "--first", "20", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.startswith("0 of 3 cases failed")


def test_without_the_bound_a_case_is_run_in_the_papers_form(monkeypatch):
    monkeypatch.setattr(evidence, "judge", lambda *args: 1 / 0)
    assert draw(1).path != "reference" and fuzz.examine_unbounded(1) == []


@pytest.mark.parametrize("options", [("--cases", "0"), ("--first", "-1"), ("--jobs", "no")])
def test_the_command_refuses_wrong_input_in_one_line(options, capsys):
    assert main(list(options)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
