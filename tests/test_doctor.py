"""``python -m prokl.doctor``: its keys, its reasons, and that it reports whatever is broken."""

import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from prokl import doctor, ops
from prokl.backends import extension, toolkit

INSTALLED = ["python", "prokl", "torch", "triton", "nvcc"]
ON_A_CPU = [*INSTALLED, "extension", "gpu", "cpu step", "cpu qr"]


def read(printed):
    """The report as a dictionary."""
    return dict(re.split(r"  +", line, maxsplit=1) for line in printed.splitlines())


def diagnose(capsys):
    doctor.main()
    return read(capsys.readouterr().out)


@pytest.mark.parametrize("argument, status", [("--help", 0), ("-h", 0), ("--verbose", 2), ("cuda", 2)])
def test_help_says_what_it_does_and_an_unknown_option_is_refused(argument, status, capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main([argument])
    printed = capsys.readouterr()
    assert stop.value.code == status and "triton" not in printed.out
    if status:
        assert printed.out == "" and f"unrecognized arguments: {argument}" in printed.err
    else:
        assert "python -m prokl.doctor" in printed.out and "What would run here, and why" in printed.out


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_command_answers_every_question_on_a_cpu(no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prokl.doctor"])
    monkeypatch.delitem(sys.modules, "prokl.doctor")
    runpy.run_module("prokl.doctor", run_name="__main__")
    printed = capsys.readouterr()
    found = read(printed.out)
    assert list(found) == ON_A_CPU and printed.err == ""
    columns = {re.match(r"\S+(?: \S+)*  +", line).end() for line in printed.out.splitlines()}
    assert len(columns) == 1  # in which all values stand
    assert not [key for key, text in found.items() if text.startswith("cannot tell")]
    assert found["torch"].startswith(torch.__version__)
    assert found["gpu"] == "none: torch sees no CUDA device"


@pytest.mark.parametrize(
    "key, owner, name",
    [
        ("nvcc", toolkit, "find_nvcc"),
        ("extension", extension, "load"),
        ("cpu step", ops, "explain"),
        ("cpu qr", ops, "explain_qr"),
        ("gpu", torch.cuda, "is_available"),
    ],
)
def test_what_breaks_costs_its_own_line_only(key, owner, name, no_gpu, monkeypatch, capsys):
    def broken(*arguments):
        raise RuntimeError("out\nof order")

    monkeypatch.setattr(owner, name, broken)
    found = diagnose(capsys)
    assert list(found) == ON_A_CPU
    assert found[key] == "cannot tell: RuntimeError: out of order"
    assert found["python"].startswith(sys.version.split()[0])


def test_what_is_missing_is_told_with_the_remedy(no_gpu, monkeypatch, capsys):
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    monkeypatch.setattr(toolkit, "find_nvcc", lambda environ: None)
    monkeypatch.setattr(extension, "load", lambda: (None, "it was left out"))
    found = diagnose(capsys)
    assert found["triton"] == (
        "not installed; only GPUs and the kernels' interpreter take it: pip install triton, or a CUDA build of torch, "
        "which brings its own"
    )
    assert found["nvcc"] == "not found; only needed to build the extension"
    assert found["extension"] == "it was left out"


def test_each_gpu_is_told_with_whether_the_extension_runs_there(monkeypatch, capsys):
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    module = SimpleNamespace(architectures="80;90", __file__="_C.so")
    monkeypatch.setattr(extension, "load", lambda: (module, None))
    monkeypatch.setattr(extension, "_failure", lambda device: None)
    found = diagnose(capsys)
    assert list(found)[len(INSTALLED) + 1 :] == [
        *("gpu 0", "gpu 1"),
        *(f"{device} {what}" for device in ("cpu", "cuda:0", "cuda:1") for what in ("step", "qr")),
    ]
    assert (found["gpu 0"], found["gpu 1"]) == ("GPU 0, compute capability 9.0", "GPU 1, compute capability 7.5")
    assert found["extension"] == "built for 80, 90 (_C.so)"
    assert found["cuda:0 qr"] == "CUDA extension: it runs on cuda:0"
    assert found["cuda:1 step"].startswith("torch: ")


BENCH_SCRIPT = "import sys; from bench.command import command; sys.exit(command(lambda argv: print('a line') or 0)())"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, code", [(["-m", "prokl.doctor"], 0), (["-c", BENCH_SCRIPT], 141)], ids=["doctor", "bench"]
)
def test_a_report_ends_quietly_where_its_reader_has_enough(command, code):
    ours = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ours.stdout.close()
    printed = ours.stderr.read()
    assert (ours.wait(), printed) == (code, "")
