"""``python -m prokl.doctor``: its keys, its reasons, and that it reports whatever is broken."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from prokl import doctor, ops
from prokl.backends import extension, toolkit
from tests.building import ROOT

INSTALLED = ["python", "prokl", "torch", "triton", "nvcc"]
ON_A_CPU = [*INSTALLED, "extension", "gpu", "cpu step", "cpu qr"]


def read(printed):
    """The report as a dictionary."""
    return dict(re.split(r"  +", line, maxsplit=1) for line in printed.splitlines())


def diagnose(capsys):
    doctor.main()
    return read(capsys.readouterr().out)


def run(folder=None):
    path = os.pathsep.join(filter(None, (str(folder or ""), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-m", "prokl.doctor"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_says_what_it_does_and_reports_nothing(argument, capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main([argument])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and "python -m prokl.doctor" in printed and "What would run here, and why" in printed
    assert "triton" not in printed


@pytest.mark.parametrize("argument", ["--verbose", "cuda"])
def test_an_unknown_option_is_refused(argument, capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main([argument])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "" and f"unrecognized arguments: {argument}" in printed.err


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_command_answers_every_question_on_a_cpu():
    done = run()
    assert done.returncode == 0 and done.stderr == ""
    found = read(done.stdout)
    assert list(found) == ON_A_CPU
    assert not [key for key, text in found.items() if text.startswith("cannot tell")]
    assert found["torch"].startswith(torch.__version__)
    assert found["gpu"] == "none: torch sees no CUDA device"


def test_values_stand_in_one_column(no_gpu, capsys):
    doctor.main()
    printed = capsys.readouterr().out.splitlines()
    assert len({re.match(r"\S+(?: \S+)*  +", line).end() for line in printed}) == 1


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


def test_a_missing_triton_is_told_with_the_remedy(no_gpu, monkeypatch, capsys):
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    assert diagnose(capsys)["triton"] == (
        "not installed; only GPUs and the kernels' interpreter take it: pip install triton, or a CUDA build of torch, "
        "which brings its own"
    )


def test_a_missing_nvcc_is_told_and_that_only_a_build_needs_it(no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(toolkit, "find_nvcc", lambda environ: None)
    assert diagnose(capsys)["nvcc"] == "not found; only needed to build the extension"


def test_an_extension_is_told_with_its_architectures(no_gpu, monkeypatch, capsys):
    module = SimpleNamespace(architectures="80;90", __file__="/there/_C.so")
    monkeypatch.setattr(extension, "load", lambda: (module, None))
    assert diagnose(capsys)["extension"] == "built for 80, 90 (/there/_C.so)"


def test_an_absent_extension_is_told_with_the_reason(no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(extension, "load", lambda: (None, "it was left out"))
    assert diagnose(capsys)["extension"] == "it was left out"


def test_each_gpu_is_told_with_whether_the_extension_covers_it(monkeypatch, capsys):
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    versions = {"built_with": lambda: 13000, "driver_knows": lambda: 13000}
    module = SimpleNamespace(architectures="80;90", __file__="_C.so", **versions)
    monkeypatch.setattr(extension, "load", lambda: (module, None))
    monkeypatch.setattr(extension, "_failure", lambda device: None)
    found = diagnose(capsys)
    assert list(found)[len(INSTALLED) + 1 :] == [
        *("gpu 0", "gpu 1"),
        *(f"{device} {what}" for device in ("cpu", "cuda:0", "cuda:1") for what in ("step", "qr")),
    ]
    assert (found["gpu 0"], found["gpu 1"]) == ("GPU 0, compute capability 9.0", "GPU 1, compute capability 7.5")
    assert found["cuda:0 qr"] == "CUDA extension: it runs on cuda:0"
    assert found["cuda:1 step"].startswith("torch: ")
