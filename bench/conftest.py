"""Options of ``pytest bench``, and where its rows go."""

from pathlib import Path

import pytest
import torch

from bench.shapes import PAPER, SETS, SMALL


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("prokl's microbenchmarks")
    options.addoption("--device", choices=("cpu", "cuda"), help="default: cuda where there is such a device")
    sets = f"of {', '.join(SETS)} (default: {', '.join(SMALL)}; on cuda {', '.join(PAPER)})"
    options.addoption("--sets", nargs="+", choices=SETS, metavar="SET", help=sets)
    options.addoption("--seconds", type=float, default=0.2, metavar="S", help="of timing a form (default: 0.2)")
    options.addoption("--rows", type=Path, metavar="CSV", help="put the rows there, in place of the same ones")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    option.device = option.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    option.sets = option.sets or (SMALL if option.device == "cpu" else PAPER)


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> "Results":  # noqa: F821  (imports Triton)
    from bench.micro.groups import Results

    torch.set_float32_matmul_precision("highest")
    option = request.config.option
    return Results(torch.device(option.device), option.seconds, option.rows)
