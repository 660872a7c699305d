"""The benches' command lines in a process of their own, as a user without a GPU runs them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prokl.kernels.launch import INTERPRETED

ROOT = Path(__file__).parent.parent
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter, so a machine without CUDA")


def run(module, *arguments, **variables):
    """``python -m module arguments`` with these environment variables, TRITON_INTERPRET only if it is among them."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))
