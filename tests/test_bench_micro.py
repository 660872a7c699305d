"""The microbenchmarks: every form is checked before it is timed, what is wrong is found, and what is written."""

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("pytest_benchmark")

from bench import gate, rows  # noqa: E402
from bench.micro import groups  # noqa: E402
from bench.micro.case import FP32_POLAR, FP64, Sizes, complaint, expect, flat, numbers  # noqa: E402
from bench.micro.groups import LIBRARY, OURS, PLAIN, Results  # noqa: E402
from bench.micro.kernels import KERNELS, PRIMITIVES  # noqa: E402
from bench.shapes import SETS, SMALL, ParameterSet  # noqa: E402
from prokl.algorithm.algebra import Algebra  # noqa: E402
from prokl.backends.select import select  # noqa: E402
from prokl.kernels.launch import INTERPRETED  # noqa: E402
from tests.commands import ROOT, read  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = ParameterSet("tiny", ((2, 12, 20), (1, 20, 12), (2, 12, 12)), (2, 4))
SIZES = Sizes(2, 24, 40, 8)
EVERY = (*PRIMITIVES, *KERNELS)
COMPARED = [case for own in PRIMITIVES for case in (own, own.counterpart) if case]
ON_CPU = Algebra(host_readable=True)


def inputs(case, d=FP32_POLAR, device=CPU):
    drawn = case.inputs(SIZES, d, numbers(device))
    return lambda: deepcopy(drawn)


def named(name):
    return next(case for case in EVERY if case.name == name)


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_every_primitive_of_the_kernels_agrees_with_its_form(case):
    """Over PyTorch the test of the command below does so; the kernels by themselves are called by bench.first."""
    device = torch.device("cpu" if INTERPRETED else "cuda")
    d = FP64 if FP64 in case.dtypes else FP32_POLAR  # half precision is wrong in the interpreter
    assert complaint(case, select("triton", device, case.precision).ops, inputs(case, d, device=device)) == ""


def changed(case, change):
    return replace(case, bind=lambda i, ops: lambda: change(case.bind(i, ops)()))


@pytest.mark.parametrize(
    "wrong",
    [lambda x: 1.0001 * x, lambda x: x * float("nan"), lambda x: x.roll(1, 0), lambda x: x[:1]],
    ids=["a ten thousandth", "nan", "rolled", "shape"],
)
def test_a_wrong_result_is_found_whichever_of_several_it_is(wrong):
    case = named("refresh")
    for place in range(2):

        def change(results, place=place):
            found = flat(results)
            assert len(found) == 2
            return [wrong(x) if i == place else x for i, x in enumerate(found)]

        assert complaint(changed(case, change), ON_CPU, inputs(case)).startswith("error ")
    other = replace(named("Newton-Schulz"), plain=lambda i: 1.001 * named("Newton-Schulz").plain(i))
    assert "from the reference in float64" in complaint(other, None, inputs(other))


def test_half_precision_is_held_to_the_plain_form_in_it():
    truth, x = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bfloat16)
    assert gate.complaint([x + 0.25], [x + 0.0625], [truth]) == ""
    assert gate.complaint([x + 0.3125], [x + 0.0625], [truth]) == "error 3.1e-01 in bfloat16, may be 2.8e-01"


def forms_of(g, device):
    return [(form.name, form.backend) for form in g.forms(device)]


def test_a_bucket_of_two_sets_is_measured_once():
    found = {g.sizes: g.sets for g in groups.groups([SETS[name] for name in SMALL], CPU)}
    assert found[Sizes(12, 192, 192, 32)] == ("gpt2-124m/4", "llama-134m/4") and len(found) == 7
    assert groups.groups([ParameterSet("s", ((1, 8, 8),), (128,))], CPU)[0].sizes == Sizes(1, 8, 8, 7)


@pytest.mark.parametrize("case", [case for case in KERNELS if case.library], ids=lambda case: case.name)
def test_the_librarys_product_of_deep_factors_is_that_of_pairs(case, monkeypatch):
    """A CPU has no product of bfloat16 with a sum in float32: it is taken of the same numbers in float32."""

    def wide(product):
        def of(*tensors, out_dtype=None, **given):
            return product(*(t.to(out_dtype or t.dtype) for t in tensors), **given)

        return of

    for name in ("bmm", "baddbmm"):
        monkeypatch.setattr(torch, name, wide(getattr(torch, name)))
    d = case.timed[0]
    fresh = inputs(case, d)
    expected = expect(case, fresh)
    (form,) = (form for form in groups.Group(case, SIZES, d, ()).forms(CPU) if form.name == LIBRARY)
    assert complaint(form.called, form.primitives(CPU), fresh, expected) == ""
    off = replace(case, library=lambda i: lambda: 1.0001 * case.library(i)())
    assert complaint(replace(form, case=off).called, ON_CPU, fresh, expected).startswith("error ")


@pytest.mark.parametrize("case", [case for case in KERNELS if case.balanced], ids=lambda case: case.name)
def test_a_balanced_kernel_has_a_float32_form_timed_beside(case):
    ran = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            ran.extend(t for t in (found if isinstance(found, tuple) else [found]) if isinstance(t, torch.Tensor))
            return found

    run = case.formula(case.inputs(SIZES, FP32_POLAR, numbers(CPU)))
    with Noting():
        run()
    assert {t.dtype for t in ran if t.is_floating_point() and t.ndim == 3} <= {torch.float32}


def test_rows_are_written_one_by_one_with_ratios(monkeypatch, tmp_path):
    here = dict.fromkeys(rows.SAME, "x") | {"date": "2000-01-01"}
    monkeypatch.setattr(groups.rows, "environment", lambda device: here)
    out = tmp_path / "rows.csv"
    plain = {"case": "g", "optimizer": PLAIN, "backend": "", "unit": "ms", "median": 2.0, "note": ""}
    Results(CPU, 0.001, out).add(plain)
    again, ours = Results(CPU, 0.001, out), plain | {"optimizer": OURS, "median": 1.0}
    assert again.has(plain) and not again.has(ours)
    again.add(ours)
    again.add(plain | {"median": 4.0})
    again.add(ours | {"backend": "triton"})
    found = [(r["optimizer"], r["backend"], r["ratio"]) for r in read(out)]
    assert found == [(PLAIN, "", "1"), (OURS, "", "0.5"), (OURS, "triton", "0.25")]


def pytest_bench(*arguments):
    """``pytest bench`` on a tiny set in a process of its own, without a GPU."""
    ours = ("TRITON_INTERPRET", "PYTEST_")  # as one of several test processes it would time nothing
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "tests.tiny_sets", "-p", "no:cacheprovider"]
    options = ["--device", "cpu", "--sets", "tiny", "--seconds", "0.001"]
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_times_every_primitive(tmp_path):
    done = pytest_bench("--benchmark-only", "--rows", str(tmp_path / "rows.csv"))
    assert done.returncode == 0 and "Mean" in done.stdout, done.stdout
    found = read(tmp_path / "rows.csv")
    assert [(r["case"], r["optimizer"], r["backend"], r["shapes"], r["rank"]) for r in found] == [
        (g.name, *form, f"{g.sizes.B}x{g.sizes.m}x{g.sizes.n}", "4")
        for g in groups.groups([TINY], CPU)
        for form in forms_of(g, CPU)
    ]
    for r in found:
        assert 0 < float(r["q1"]) <= float(r["median"]) <= float(r["q3"]) and 3 <= int(r["rounds"])
        plain = next(p for p in found if p["case"] == r["case"] and p["optimizer"] == PLAIN)
        assert float(r["ratio"]) == pytest.approx(float(r["median"]) / float(plain["median"]), rel=1e-5)
        assert r["unit"] == "ms" and r["device"] and r["commit"]
