"""Set up what every test shares: options, skips, Triton's interpreter and poisoned allocations."""

import os
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import pools  # noqa: F401  (a fixture)
from tests.host_extension import extension_on_cpu, host_module, takes_the_extension  # noqa: F401  (fixtures)
from tests.inputs import method, path  # noqa: F401  (fixtures)
from tests.interpreter import quicken
from tests.qr_forms import form_of  # noqa: F401  (a fixture)

# Triton reads this when a kernel is defined, so it is set before any test module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        quicken()
        import_module("prokl.kernels.launch")  # which keeps what it read, before a test that takes the variable away

# Matrices of the tests' sizes gain nothing from threads, which on a busy machine, such as one that pytest-xdist uses in
# full, take ten times as long.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    explanation = "append each failure there as it comes: a run that its limit ends says nothing of them"
    parser.addoption("--failures", type=Path, metavar="FILE", help=explanation)


class Failures:
    """Writes failures as they come."""

    def __init__(self, log):
        self.log = log

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n{report.longreprtext}\n\n")


def pytest_configure(config):
    if (log := config.getoption("--failures")) and not hasattr(config, "workerinput"):  # of xdist
        config.pluginmanager.register(Failures(log))


TESTS = Path(__file__).resolve().parent
CASES = 3
"""Cases of each test in a run of all tests without --slow, which then takes two minutes; CI runs all cases."""


def pytest_collection_modifyitems(config, items):
    skips, slow = {}, config.getoption("--slow")
    if not slow:
        skips["slow"] = pytest.mark.skip(reason="slow: run with --slow")
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="gpu: needs a CUDA device")
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)
    if not slow and [(config.invocation_params.dir / arg).resolve() for arg in config.args] == [TESTS]:
        cases, seen, kept = Counter(item.function for item in items), Counter(), []
        for item in items:
            place, count = seen[item.function], cases[item.function]
            seen[item.function] += 1
            if place * CASES // count > (place - 1) * CASES // count:  # the first one, and others far apart
                kept.append(item)
        config.hook.pytest_deselected(items=[*{*items} - {*kept}])
        items[:] = kept


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fill what torch allocates uninitialised with NaN, so that an output a kernel did not write shows."""

    def poison(owner, name):
        allocate = getattr(owner, name)

        def poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(owner, name, poisoned)

    for name in ("empty", "empty_like", "empty_strided"):
        poison(torch, name)
    for name in ("new_empty", "new_empty_strided"):
        poison(torch.Tensor, name)
