"""Builds the package in a copy of the tree, as whoever installs it would."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def clean_copy(destination):
    """Copy what a fresh clone would hold: no .git, nothing that .gitignore names."""
    ignored = (ROOT / ".gitignore").read_text().split()
    shutil.copytree(ROOT, destination, symlinks=True, ignore=shutil.ignore_patterns(".git", *ignored))
    return destination


def files_under(folder):
    """Return the relative paths of all files, through symlinks, as package data would be collected."""
    return {
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
    }


def attempt(*command, cwd, **environment):
    """Run a command, offline: its exit status and what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_NO_INDEX": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def run(*command, cwd, **environment):
    """Run a command that must succeed; on failure show what it printed."""
    status, printed = attempt(*command, cwd=cwd, **environment)
    assert status == 0, f"{command} exited {status}:\n{printed}"
    return printed


def build(source, *kinds, **environment):
    """Build with the backend installed here, under an import path on which `import torch` fails."""
    poison = source.parent / "poison"
    poison.mkdir(exist_ok=True)
    (poison / "torch.py").write_text("raise ImportError('the build imported torch')\n")
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, cwd=source, PYTHONPATH=str(poison), **environment)
    return source / "dist"


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
