"""The script ./run: which commands its jobs are, where their rows go, and what it refuses."""

import os
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


def test_bench_measures_primitives_steps_and_memory_and_a_part_that_fails_does_not_stop_the_others(script):
    status, commands, error = script("bench", "--out", "rows", fail="timing steps")
    assert status == 1 and error.endswith("\nFailed: step\n")
    assert [c.split(" ")[1] for c in commands] == ["pytest", "bench.timing", "bench.timing", "bench.tables"]
    assert "--benchmark-only" in commands[0] and commands[0].endswith("--rows /elsewhere/rows/micro-cpu.csv")
    assert commands[1].endswith("--out /elsewhere/rows/step-cpu.csv") and commands[3].endswith(" /elsewhere/rows")
    status, commands, _ = script("bench", "--part", "step")
    assert (
        status == 0
        and commands[0] == "-m bench.timing steps --out /clone/runs/bench/step-cpu.csv"
        and len(commands) == 2
    )


def test_without_triton_the_primitives_are_skipped(script):
    status, commands, error = script("bench", "--part", "micro", fail="-m pytest bench", with_status=5)
    assert status == 0 and "Failed" not in error and len(commands) == 1  # there is nothing to sum up


def test_a_gpu_s_benchmarks_are_the_same_ones_on_its_device(script):
    _, micro, _ = script("gpu", "--part", "micro", "--out", "rows")
    status, step, _ = script("gpu", "--part", "step", "--out", "rows")
    assert status == 0 and [*micro, *step] == [
        "-m pytest bench -q --benchmark-only --benchmark-quiet --device cuda --rows /elsewhere/rows/micro-gpu.csv",
        "-m bench.timing steps --device cuda --out /elsewhere/rows/step-gpu.csv",
        "-m bench.timing kernels --device cuda --out /elsewhere/rows/step-kernels-gpu.csv",
    ]
    status, commands, error = script("gpu", "--part", "micro", fail="import pytest_benchmark")
    assert status == 1 and commands == [] and "needs pytest-benchmark" in error


def test_every_part_of_a_gpu_s_run_ends_within_ten_minutes_by_itself(script, tmp_path):
    python = tmp_path / "clone" / ".venv" / "bin" / "python"
    timeout = tmp_path / "bin" / "timeout"
    timeout.parent.mkdir()
    timeout.write_text('#!/bin/sh\necho "limit $5" >>"$LOG"\nshift 5\nexec "$@"\n')
    timeout.chmod(0o755)
    (tmp_path / "clone" / "build" / "prepared").mkdir(parents=True)
    (tmp_path / "clone" / "tests").mkdir()
    (tmp_path / "clone" / "tests" / "test_some.py").write_text("pytestmark = pytest.mark.gpu")
    env = os.environ | {"LOG": str(tmp_path / "log"), "FAIL": "x x", "STATUS": "1", "PYTHON": str(python)}
    env["PATH"] = f"{timeout.parent}:{env['PATH']}"
    for part, own in (("first", 1), ("tests", 2), ("qr-tests", 1), ("sanitize", 2), ("micro", 1), ("step", 2)):
        (tmp_path / "log").write_text("")
        subprocess.run([tmp_path / "clone" / "run", "gpu", "--part", part], env=env, capture_output=True)
        limits = [int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines() if "limit" in line]
        assert len(limits) == 2 + own and sum(limits) + 15 * len(limits) <= 600, part


def test_what_was_prepared_is_taken_up_first_and_an_extension_in_place_is_not_built(script, tmp_path):
    clone = tmp_path / "clone"
    assert not any("unpack" in line for line in script("gpu", "--part", "first")[1])
    (clone / "build" / "prepared" / "extension").mkdir(parents=True)
    python = clone / ".venv" / "bin" / "python"
    python.write_text(PYTHON + 'echo "$PROKL_BUILD_CUDA $TRITON_CACHE_DIR" >>"$LOG.env"\n')
    log = tmp_path / "log.env"
    for placed in (False, True):
        if placed:
            (clone / "build" / "prepared" / "extension" / "placed").touch()
        log.unlink(missing_ok=True)
        assert script("gpu", "--part", "first")[1] == ["-m bench.compile_report unpack", "-m bench.first"]
        build, cache = log.read_text().splitlines()[-1].split(" ")
        assert (build == "0") is placed and cache == str(clone / "build" / "triton")


def test_prepare_takes_the_interpreter_as_it_is(script):
    assert script("prepare", "--only", "wheels", "--arch", "80") == (
        0,
        ["-m bench.compile_report pack --only wheels --arch 80"],
        "",
    )


def test_integrations_run_by_themselves_with_packages_that_nothing_else_installs(script, tmp_path):
    status, commands, _ = script("integrations", "-k", "peft")
    assert (status, commands) == (0, ["-m pytest --slow --no-skips tests/integrations -k peft"])
    installs = [line for line in (tmp_path / "log").read_text().splitlines() if "pip install" in line]
    assert installs[0].endswith(" -e .[dev,bench,integrations]") and installs[1].endswith(" --no-deps timm")
    assert script("integrations")[0] == 0 and "pip install" not in (tmp_path / "log").read_text()
    status, commands, _ = script("test")
    assert status == 0 and commands[-1].endswith(" --ignore tests/integrations")
    assert "-e .[dev,bench]\n" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "arguments", [["bench", "--part", "micro step"], ["bench", "--out", ""], ["gpu", "--part", "memory"]], ids=" ".join
)
def test_what_it_does_not_take_is_refused_in_one_line(arguments, script):
    status, commands, error = script(*arguments)
    assert (status, commands) == (2, [])
    assert error.startswith(f"./run {arguments[0]}: cannot take '") and error.count("\n") == 1


def test_without_a_job_and_for_help_it_says_what_there_is(script):
    status, commands, error = script()
    assert (status, commands) == (2, []) and all(
        f"./run {job}" in error for job in ("pretrain", "test", "integrations", "docs", "bench", "prepare", "gpu")
    )
    assert script("gpu", "--help") == (0, [], "")


@pytest.mark.parametrize("arguments", [["foo"], ["foo", "--help"], ["--part"]], ids=" ".join)
def test_an_unknown_job_is_named(arguments, script):
    status, commands, error = script(*arguments)
    jobs = "pretrain, test, integrations, docs, bench, prepare or gpu"
    assert (status, commands) == (2, [])
    assert error == f"./run: there is no job '{arguments[0]}'; it takes {jobs}, see ./run --help\n"


@pytest.mark.parametrize("job", ["pretrain", "test", "integrations", "bench"])
@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_help_installs_nothing(job, asked, script, tmp_path):
    python = tmp_path / "clone" / ".venv" / "bin" / "python"
    python.unlink()
    python.parent.rmdir()  # a fresh clone
    status, commands, error = script(job, asked)
    assert (status, commands, error) == (0, [], "") and "pip" not in (tmp_path / "log").read_text()
    assert not (tmp_path / "clone" / ".venv" / "installed").exists()


def test_help_of_an_installed_job_is_its_own(script, tmp_path):
    assert script("pretrain")[0] == 0
    assert script("pretrain", "--steps", "3", "--help") == (0, ["-m bench.pretrain --help"], "")
    assert script("test", "--help") == (0, [], "")  # its options are pytest's


def test_make_bench_is_the_job():
    done = subprocess.run(["make", "-n", "bench", "OUT=rows here"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.rstrip("\n") == './run bench --out "rows here"'
