"""The script ./run: which commands its jobs are, where their rows go, and what it refuses."""

import os
import re
import shutil
import subprocess

import pytest

from tests.commands import ROOT

PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
*"$FAIL"*) exit "$STATUS" ;;
esac
"""


@pytest.fixture
def script(tmp_path):
    """A copy of ./run whose Python only takes note of how it is called; returns status, commands, stderr."""
    clone, elsewhere = tmp_path / "clone", tmp_path / "elsewhere"
    (clone / ".venv" / "bin").mkdir(parents=True)
    elsewhere.mkdir()
    shutil.copy(ROOT / "run", clone)
    python = clone / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def call(*arguments, fail="nothing fails", with_status=1):
        log = tmp_path / "log"
        log.write_text("")
        env = os.environ | {"LOG": str(log), "FAIL": fail, "STATUS": str(with_status), "PYTHON": str(python)}
        done = subprocess.run([clone / "run", *arguments], cwd=elsewhere, env=env, capture_output=True, text=True)
        commands = [line for line in log.read_text().splitlines() if "pip" not in line and line.startswith("-m")]
        return done.returncode, [c.replace(str(tmp_path), "") for c in commands], done.stderr

    return call


def test_a_part_of_bench_that_fails_does_not_stop_the_others(script):
    status, commands, error = script("bench", "--out", "rows", fail="timing steps")
    assert status == 1 and error.endswith("\nFailed: step\n")
    assert [c.split(" ")[1] for c in commands] == ["pytest", "bench.timing"]
    assert "--benchmark-only" in commands[0] and commands[0].endswith("--rows /elsewhere/rows/micro-cpu.csv")
    assert commands[1].endswith("--out /elsewhere/rows/step-cpu.csv")
    status, commands, _ = script("bench", "--part", "step")
    assert (
        status == 0
        and commands[0] == "-m bench.timing steps --out /clone/runs/bench/step-cpu.csv"
        and commands[1:] == ["-m bench.tables --steps /clone/runs/bench/step-cpu.csv"]
    )


def test_a_gpu_s_benchmarks_are_the_same_ones_on_its_device(script):
    _, micro, _ = script("gpu", "--part", "micro", "--out", "rows")
    status, step, _ = script("gpu", "--part", "step", "--out", "rows")
    assert status == 0 and [*micro, *step] == [
        "-m pytest bench -q --benchmark-only --benchmark-quiet --device cuda --rows /elsewhere/rows/micro-gpu.csv",
        "-m bench.timing kernels --device cuda --out /elsewhere/rows/kernels-gpu.csv",
        "-m bench.timing steps --device cuda --out /elsewhere/rows/step-gpu.csv",
    ]
    prepare = "-m bench.compile_report pack --only wheels --arch 80"
    assert script("prepare", "--only", "wheels", "--arch", "80") == (0, [prepare], "")  # the interpreter as it is


def test_prepared_parts_are_taken_up_first(script, tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    assert not any("unpack" in line for line in script("gpu", "--part", "first")[1])
    (clone / "build" / "prepared" / "extension").mkdir(parents=True)
    python = clone / ".venv" / "bin" / "python"
    python.write_text(PYTHON + 'echo "$PROKL_BUILD_CUDA $TRITON_CACHE_DIR" >>"$LOG.env"\n')
    log, home = tmp_path / "log.env", tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for placed in (False, True):
        if placed:
            (clone / "build" / "prepared" / "extension" / "placed").touch()
        log.unlink(missing_ok=True)
        assert script("gpu", "--part", "first")[1] == ["-m bench.compile_report unpack", "-m bench.first"]
        build, cache = log.read_text().splitlines()[-1].split(" ")
        assert (build == "0") is placed and cache == str(home / ".cache" / "prokl" / "triton")


def test_gpu_tests_have_every_file_that_takes_a_gpu_by_itself():
    listed = re.search(r"for subject in (.*?); do", (ROOT / "run").read_text(), re.DOTALL)[1].replace("\\", "").split()
    files = {path.stem.removeprefix("test_"): path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    assert not {*listed} - {*files}
    own = r"^DEVICE = .*is_available\(\)|import .*\bDEVICE\b"
    taking = {name for name, text in files.items() if re.search(own, text, re.MULTILINE)}
    assert taking - {"bench_first"} <= {*listed}  # which is a part of its own


def test_integrations_run_with_packages_of_their_own(script, tmp_path):
    status, commands, _ = script("integrations", "-k", "peft")
    assert (status, commands) == (0, ["-m pytest --slow --no-skips tests/integrations -k peft"])
    installs = [line for line in (tmp_path / "log").read_text().splitlines() if "pip install" in line]
    assert installs[0].endswith(" -e .[dev,bench,integrations]") and installs[1].endswith(" --no-deps timm")
    assert script("integrations")[0] == 0 and "pip install" not in (tmp_path / "log").read_text()
    status, commands, _ = script("test")
    assert status == 0 and commands[-1].endswith(" --ignore tests/integrations")
    assert "-e .[dev,bench]\n" in (tmp_path / "log").read_text()


def test_pretrain_installs_what_it_needs_in_sight_or_takes_what_is_there(script, tmp_path):
    def installed():
        return [line.partition("-e ")[2] for line in (tmp_path / "log").read_text().splitlines() if " install " in line]

    for expected in ([".[pretrain]"], []):  # the second time it is there
        status, commands, error = script("pretrain", "--steps", "3")
        assert (status, commands, installed()) == (0, ["-m bench.pretrain --steps 3"], expected)
        assert ("Installing" in error) is bool(expected)
    (tmp_path / "clone" / ".venv" / "installed-pretrain").unlink()
    assert script("test")[0] == 0 and installed() == [".[dev,bench]"]
    assert " -q" not in (tmp_path / "log").read_text()  # which would hide pip's progress
    assert script("pretrain")[0] == 0 and installed() == []  # the tools of tests have all of it


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bench", "--part", "micro step"], "./run bench: cannot take '"),
        (["bench", "--out", ""], "./run bench: cannot take '"),
        (["gpu", "--part", "memory"], "./run gpu: cannot take '"),
        (["gpu", "--part", "step", "--minutes", "3"], "./run gpu: --data and --minutes are for --part train"),
        (["bench", "--data", "shards"], "./run bench: cannot take '"),
        (["foo"], "./run: there is no job 'foo'; it takes pretrain, test, "),
    ],
    ids=lambda given: " ".join(given),
)
def test_what_it_does_not_take_is_refused_in_one_line(arguments, message, script):
    status, commands, error = script(*arguments)
    assert (status, commands) == (2, [])
    assert error.startswith(message) and error.count("\n") == 1


@pytest.mark.parametrize("job", ["pretrain", "test", "integrations", "bench", "gpu"])
def test_help_installs_nothing(job, script, tmp_path):
    shutil.rmtree(tmp_path / "clone" / ".venv")  # a fresh clone
    assert script(job, "--help") == (0, [], "")
    assert not (tmp_path / "clone" / ".venv").exists()
