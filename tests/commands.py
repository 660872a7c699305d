"""Python in a process of its own, as a user without a GPU runs it; and the rows of a file."""

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_python(*arguments, cwd=None, **variables):
    """Run Python with these environment variables; TRITON_INTERPRET only if it is among them, and no GPU."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))
