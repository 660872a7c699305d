"""Options of ``pytest bench``, and where its rows go."""

from pathlib import Path

import pytest
import torch

from bench import records
from bench.errors import UsageError
from bench.micro.ledger import Ledger
from bench.shapes import PAPER, SETS, SMALL

SECONDS = 0.2


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("prokl's microbenchmarks")
    options.addoption("--device", choices=("cpu", "cuda"), help="default: cuda where there is such a device")
    options.addoption(
        "--sets",
        nargs="+",
        choices=SETS,
        metavar="SET",
        help=f"of {', '.join(SETS)} (default: {', '.join(SMALL)}; on cuda {', '.join(PAPER)})",
    )
    options.addoption(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"of timing per contender (default: {SECONDS:g})"
    )
    options.addoption("--rows", type=Path, metavar="CSV", help="put the rows there, in place of a group's old ones")
    options.addoption("--again", action="store_true", help="measure also what --rows has of this commit and machine")


def pytest_configure(config: pytest.Config) -> None:
    rows, seconds = config.getoption("--rows"), config.getoption("--seconds")
    if not seconds > 0:
        raise pytest.UsageError(f"--seconds {seconds:g}: must be more than 0")
    config.option.device = config.option.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if config.option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    config.option.sets = config.option.sets or (SMALL if config.option.device == "cpu" else PAPER)
    if rows:
        try:
            records.read(rows)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> Ledger:
    torch.set_float32_matmul_precision("highest")
    option = request.config.option
    return Ledger(torch.device(option.device), option.seconds, option.rows, option.again)
