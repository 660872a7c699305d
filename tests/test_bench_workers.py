"""``bench.workers``: a run has a process of its own, which Ctrl-C ends after its step and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

from bench.workers import GOES_ON, one_run_each
from tests.commands import ROOT

COMMAND = """
import sys, time
from functools import partial
from pathlib import Path

from bench.command import command
from bench.workers import asked_to_stop, work_off


def run(path):
    with asked_to_stop() as stop:
        path.write_text("begun")
        while not stop():
            time.sleep(0.01)
        path.write_text("whole")


@command
def main(argv):
    work_off(lambda: "abc", lambda name: partial(run, Path(argv[0], name)), print, 2)


if __name__ == "__main__":
    sys.exit(main())
"""


def test_every_run_has_a_process_of_its_own():
    with one_run_each(1) as pool:
        assert len({pool.submit(os.getpid).result() for _ in range(2)}) == 2


def test_ctrl_c_ends_runs_after_their_step(tmp_path):
    """The command has a session of its own, since Ctrl-C goes to all processes of a terminal's foreground."""
    script, folder = tmp_path / "script.py", tmp_path / "runs"
    script.write_text(COMMAND)
    folder.mkdir()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        process = subprocess.Popen(
            [sys.executable, script, folder], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 120
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, error = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 130 and error == f"{GOES_ON}\n"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "whole", "b": "whole"}
