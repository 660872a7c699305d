"""The line that says why a first step takes long: where Triton compiles what is not in its cache."""

import logging

import pytest
import torch

triton = pytest.importorskip("triton")
from prokl.kernels import launch  # noqa: E402

CPU = torch.device("cpu")


class Kernel:
    """Compiles as it is launched, or finds what was compiled, and tells Triton's listener of it."""

    def __init__(self, name, cache_hit):
        self.__name__, self.cache_hit = name, cache_hit

    def __getitem__(self, grid):
        listener = triton.knobs.compilation.listener or dict
        return lambda: listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=self.cache_hit)


@pytest.fixture
def lines(caplog, monkeypatch):
    """Launch kernels, by name, of which this many are in the cache; return what was logged."""
    monkeypatch.setattr(launch, "_logged", False)
    monkeypatch.setattr(launch, "_begun", set())

    def launched(*kernels):
        with caplog.at_level(logging.INFO, "prokl"):
            for name, cache_hit in kernels:
                launch.start(Kernel(name, cache_hit), (1,), CPU)
        return [record.getMessage() for record in caplog.records]

    return launched


def test_the_first_kernel_that_is_compiled_says_so_and_no_other(lines):
    assert lines(("a", True)) == []
    (line,) = lines(("b", False), ("c", False), ("b", False))
    assert str(triton.knobs.cache.dir) in line


def test_a_full_cache_says_nothing(lines):
    assert lines(("a", True), ("b", True), ("a", True)) == []


def test_a_listener_of_the_users_own_hears_all_and_stays(lines):
    heard = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = own = lambda **compilation: heard.append(compilation["cache_hit"])
        lines(("a", True), ("b", False), ("a", True))
        assert triton.knobs.compilation.listener is own
    assert heard == [True, False, True]
