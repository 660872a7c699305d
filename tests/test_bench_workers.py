"""``bench.workers``: a run has a process of its own, which an interrupted command does not leave behind."""

import multiprocessing
import os
import time

import pytest

from bench.workers import one_run_each


def test_every_run_has_a_process_of_its_own():
    with one_run_each(1) as pool:
        assert len({pool.submit(os.getpid).result() for _ in range(2)}) == 2


def test_ctrl_c_ends_runs_under_way_at_once_and_starts_no_other():
    begun, others = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), one_run_each(1) as pool:
        runs = [pool.submit(time.sleep, 600) for _ in range(3)]
        while not runs[0].running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 300
    assert set(multiprocessing.active_children()) <= others
    assert runs[2].cancelled() or runs[2].exception() is not None
