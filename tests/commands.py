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


def run_python(*arguments, **variables):
    """Run Python with these environment variables; TRITON_INTERPRET only if it is among them, and no GPU."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=900)


def run(module, *arguments, **variables):
    """``python -m module arguments`` likewise."""
    return run_python("-m", module, *arguments, **variables)


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))
