"""Set up the tests with other packages: no network, no skip that hides, one process that forgets between tests."""

import importlib.abc
import importlib.machinery
import os
import sys
import types

import pytest
import torch
from torch import nn

# Read when huggingface_hub is imported, which is after this.
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a skip, as of a missing package, is a failure")


def without_skips(config, report):
    """Return a report of which --no-skips made a failure, where it was one of a skip; an expected failure is none."""
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("--no-skips", False):
        report.outcome = "failed"
        report.longrepr = f"Skipped, under --no-skips: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return without_skips(collector.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return without_skips(item.config, (yield))


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder of its own, the CPU whatever the machine has, and nothing left of the test before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook under which torchvision is modules of empty classes."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision") else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name):
        # timm goes on without InterpolationMode, which is no class to derive from but a list of constants.
        if name.startswith("__") or name == "InterpolationMode":
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


@pytest.fixture
def timm():
    """timm, without torchvision where that is missing: what timm needs of it is for images, not for training."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # a build for CUDA beside a torch for CPUs ends in RuntimeError
        finder = _Torchvision()
        sys.meta_path.insert(0, finder)
        try:
            return pytest.importorskip("timm")
        finally:  # other packages ask whether there is a torchvision
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
    return pytest.importorskip("timm")
