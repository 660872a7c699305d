"""Building the CUDA extension: what asks for it, with what, and what comes out."""

import os
import sys
from pathlib import Path

import pytest

from tests.building import attempt, build, clean_copy, contents, run

pytest.importorskip("setuptools")

import build_cuda  # noqa: E402
from build_cuda import ToolkitError, toolkit  # noqa: E402

NVCC = toolkit.find_nvcc(os.environ)
with_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")

STAND_IN = """#!{python}
import os, sys
from pathlib import Path

words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, sep="\\n", end="\\n\\n", file=log)
if "--version" in words:
    print("Cuda compilation tools, release 12.4, V12.4.131")
elif "--list-gpu-code" in words:
    print("sm_75\\nsm_80\\nsm_90\\nsm_90a\\nsm_89")
elif "--dryrun" in words:
    sys.exit(any("compute_" + name in word for word in words for name in {unknown!r}))
elif {status!r}:
    sys.exit("the stand-in fails")
else:
    Path(words[words.index("-o") + 1]).write_text("made")
    if "-MD" in words:
        source = words[words.index("-c") + 1]
        made = words[words.index("-o") + 1]
        header = Path(source).with_name("common.cuh")
        listed = " ".join(str(path).replace(" ", "\\\\ ") for path in (source, header))
        Path(words[words.index("-MF") + 1]).write_text(f"{{made}} : {{listed}}\\n")
"""


def stand_in(folder, unknown=("100", "120"), status=0):
    """A program that answers like nvcc 12.4 and writes down what it was called with; and that record."""
    folder.mkdir(exist_ok=True)
    program, log = folder / "nvcc", folder / "log"
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log), unknown=unknown, status=status))
    program.chmod(0o755)
    return program, log


def calls(log):
    """The calls that compiled or linked, each a list of words."""
    return [call for text in log.read_text().split("\n\n") if "-o" in (call := text.split("\n"))]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with small sources, in a folder whose name has a space."""
    root = tmp_path / "the tree"
    (root / "csrc").mkdir(parents=True)
    for name in ("a.cu", "binding.cpp", "common.cuh"):
        (root / "csrc" / name).write_text("")
    monkeypatch.setattr(build_cuda, "ROOT", root)
    return root


WRONG = {
    "PROKL_BUILD_CUDA": ("", "2", "yes", "AUTO", "01"),
    "PROKL_CUDA_ARCHS": ("", "75", "9.0", "sm_90", "90x", "80;;90", "80,90", "80;75", "090", "80 ;90", "native"),
}
MUST = {"PROKL_BUILD_CUDA": r"one of \('auto', '1', '0'\)", "PROKL_CUDA_ARCHS": ".* at least 80"}


@pytest.mark.parametrize("variable, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_setting_is_refused_with_what_it_must_be(variable, value):
    with pytest.raises(ToolkitError, match=f"^Invalid {variable}='{value}': .*must be {MUST[variable]}"):
        build_cuda.extensions({variable: value, "PATH": ""}, [])


def test_the_default_builds_where_the_tools_are(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toolkit, "USUAL_NVCC", str(tmp_path / "nowhere"))
    program, _ = stand_in(tmp_path / "bin")
    absent, present = {"PATH": str(tmp_path)}, {"PATH": str(program.parent)}
    assert build_cuda.extensions(absent, ["egg_info"]) == [] and capsys.readouterr().out == ""
    assert [e.name for e in build_cuda.extensions(present, ["egg_info"])] == ["prokl._C"]
    assert build_cuda.extensions(present | {"PROKL_BUILD_CUDA": "0"}, ["egg_info"]) == []
    assert build_cuda.extensions(absent | {"PROKL_BUILD_CUDA": "1"}, ["egg_info"]) != []
    assert build_cuda.extensions(absent, ["bdist_wheel"]) == []
    assert "without the CUDA extension: nvcc not found" in capsys.readouterr().out
    program.write_text(program.read_text().replace("V12.4.131", "V11.7.99"))
    assert build_cuda.extensions(present, ["bdist_wheel"]) == []  # too old for the sources
    assert "without the CUDA extension: nvcc 11.8 or newer not found" in capsys.readouterr().out
    with pytest.raises(ToolkitError, match="nvcc 11.8 or newer was not found: name a newer one in CUDACXX"):
        build_cuda.build(present, tmp_path / "build", tmp_path / "out.so")


def test_every_missing_tool_is_named_with_its_remedy(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit, "USUAL_NVCC", str(tmp_path / "nowhere"))
    monkeypatch.setattr(build_cuda, "find_ninja", lambda: None)
    with pytest.raises(ToolkitError) as caught:
        build_cuda.build({"PATH": ""}, tmp_path / "build", tmp_path / "out.so")
    for part in ("nvcc was not found: put it on PATH", "ninja was not found: pip install ninja", "PROKL_BUILD_CUDA=0"):
        assert part in str(caught.value)


def test_nvcc_is_looked_for_where_named_then_in_usual_places(tmp_path, monkeypatch):
    places = {}
    for place in ("named", "home/bin", "path/bin", "search", "usual"):
        (tmp_path / place).mkdir(parents=True)
        places[place] = str(stand_in(tmp_path / place)[0])
    monkeypatch.setattr(toolkit, "USUAL_NVCC", places["usual"])
    environ = {"CUDACXX": places["named"], "CUDA_HOME": str(tmp_path / "home"), "CUDA_PATH": str(tmp_path / "path")}
    environ["PATH"] = str(tmp_path / "search")
    found = []
    for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "PATH"):
        found.append(toolkit.find_nvcc(environ))
        environ[variable] = str(tmp_path / "empty") if variable != "CUDACXX" else ""
    assert [*found, toolkit.find_nvcc(environ)] == list(places.values())
    monkeypatch.setattr(toolkit, "USUAL_NVCC", str(tmp_path / "nowhere"))
    assert toolkit.find_nvcc(environ) is None


def test_usual_architectures_are_built_as_far_as_nvcc_knows(tmp_path):
    old, _ = stand_in(tmp_path / "old")
    new, _ = stand_in(tmp_path / "new", unknown=())
    none, _ = stand_in(tmp_path / "none", unknown=("80", "90", "100"))
    assert build_cuda.architectures({}, str(old)) == ["80", "90"]
    assert build_cuda.architectures({}, str(new)) == ["80", "90", "100"]
    unordered = {"PROKL_CUDA_ARCHS": "120;90a;80;100f;90;80"}
    assert build_cuda.named_architectures(unordered) == ["80", "90", "90a", "100f", "120"]
    script = none.read_text()
    none.write_text(script.replace("sm_80\\nsm_90\\nsm_90a\\nsm_89", "sm_120"))
    with pytest.raises(ToolkitError, match="does not compile for 80, 90, 100; must be among 120\\."):
        build_cuda.architectures({}, str(none))
    named = {"PROKL_CUDA_ARCHS": "80;120"}
    with pytest.raises(ToolkitError, match="'80;120': nvcc 12.4.131 .* for 120; must be among 80, 89, 90, 90a\\."):
        build_cuda.architectures(named, str(old))
    # A failure for architectures that it knows is another thing, which it says.
    none.write_text(script.replace("sys.exit(any(", "sys.exit('gcc is not there' * any("))
    for environ in ({}, named):
        with pytest.raises(ToolkitError, match="exited 1: gcc is not there.*PROKL_BUILD_CUDA=0 installs without"):
            build_cuda.architectures(environ, str(none))


@with_nvcc
def test_this_nvcc_knows_its_own_architectures_and_no_others():
    known = toolkit.ask(NVCC, "--list-gpu-code").split()
    assert known and all(build_cuda.takes(NVCC, name.removeprefix("sm_")) for name in known)
    assert not build_cuda.takes(NVCC, "81") and not build_cuda.takes(NVCC, "9990")


def test_machine_code_is_made_for_each_and_ptx_for_the_newest():
    def codes(*names):
        return [word.partition(",code=")[2] for word in build_cuda.generate(names) if ",code=" in word]

    assert codes("80", "90") == ["sm_80", "[sm_90,compute_90]"]
    assert codes("80", "90a") == ["[sm_80,compute_80]", "sm_90a"]
    assert codes("90a", "100f") == ["sm_90a", "sm_100f"]


@pytest.mark.slow
def test_each_changed_source_is_compiled_for_all_architectures(tree, tmp_path):
    pytest.importorskip("ninja")
    program, log = stand_in(tmp_path / "bin")
    target = tmp_path / "the target" / "_C.so"

    def compiled(**environ):
        log.write_text("")
        build_cuda.build({"CUDACXX": str(program), "PATH": os.environ["PATH"], **environ}, tmp_path / "a b", target)
        return {Path(call[call.index("-o") + 1]).name: call for call in calls(log)}

    first, every = compiled(), {"_C.so", "a.cu.o", "binding.cpp.o"}
    assert first.keys() == every and target.read_text() == "made"
    assert "arch=compute_90,code=[sm_90,compute_90]" in first["a.cu.o"]
    assert '-DPROKL_CUDA_ARCHS="80;90"' in first["binding.cpp.o"]
    assert first["_C.so"][first["_C.so"].index("-cudart") + 1] == "static"
    assert compiled() == {}
    (tree / "csrc" / "common.cuh").write_text("changed")
    assert compiled().keys() == every
    (tree / "csrc" / "a.cu").write_text("changed")
    assert compiled().keys() == {"_C.so", "a.cu.o"}
    assert compiled(PROKL_CUDA_ARCHS="80").keys() == every


def test_a_failing_compiler_tells_how_to_install_without(tree, tmp_path, capfd):
    pytest.importorskip("ninja")
    program, _ = stand_in(tmp_path / "bin", status=1)
    with pytest.raises(ToolkitError, match="does not compile.*PROKL_BUILD_CUDA=0 installs without"):
        build_cuda.build({"CUDACXX": str(program), "PATH": os.environ["PATH"]}, tmp_path / "b", tmp_path / "_C.so")
    assert "the stand-in fails" in capfd.readouterr().out


BROKEN = {
    "fails": (b"#!/bin/sh\necho 'no library' >&2; exit 3", 0o755, "--version exited 3: no library. Repair it, or name"),
    "fails without a word": (b"#!/bin/sh\nexit 3", 0o755, "--version exited 3: it says nothing. Repair it, or name"),
    "is something else": (b"#!/bin/sh\necho hello", 0o755, "--version names no version: 'hello'. Repair it, or name"),
    "is of another machine": (b"\x7fELF of another machine", 0o755, "cannot be run: "),
    "is no program": (b"", 0o644, "must be a program"),
    "is absent": (None, 0, "must be a program"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("mode", ["auto", "1"])
def test_a_broken_nvcc_tells_how_to_install_without(how, mode, tree, tmp_path):
    content, rights, says = BROKEN[how]
    program = tmp_path / "nvcc"
    if content is not None:
        program.write_bytes(content)
        program.chmod(rights)
    environ = {"CUDACXX": str(program), "PATH": os.environ["PATH"], "PROKL_BUILD_CUDA": mode}
    with pytest.raises(ToolkitError) as caught:
        build_cuda.extensions(environ, ["bdist_wheel"])
        build_cuda.build(environ, tmp_path / "build", tmp_path / "_C.so")
    assert says in str(caught.value)
    assert str(caught.value).endswith("PROKL_BUILD_CUDA=0 installs without the CUDA extension.")
    assert build_cuda.extensions(environ | {"PROKL_BUILD_CUDA": "0"}, ["bdist_wheel"]) == []


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clean copy of the tree that finds no nvcc but the one it is told."""
    source = clean_copy(tmp_path_factory.mktemp("build") / "clone")
    finder = source / "prokl" / "backends" / "toolkit.py"
    assert toolkit.USUAL_NVCC in finder.read_text()
    finder.write_text(finder.read_text().replace(toolkit.USUAL_NVCC, str(source / "absent")))
    return source


NOWHERE = {"CUDACXX": "", "CUDA_HOME": "", "CUDA_PATH": "", "PATH": "/nonexistent"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "value, command, complaint",
    [
        ("1", "build_ext", "nvcc was not found"),
        ("maybe", "egg_info", "Invalid PROKL_BUILD_CUDA='maybe'"),
    ],
)
def test_a_build_that_was_asked_for_fails_in_one_line(clone, value, command, complaint):
    status, printed = attempt(sys.executable, "setup.py", "-q", command, cwd=clone, **NOWHERE, PROKL_BUILD_CUDA=value)
    assert status == 1
    assert complaint in printed.splitlines()[-1] and "Traceback" not in printed


@with_nvcc
@pytest.mark.slow
def test_a_wheel_with_the_extension_imports_without_cuda(clone, tmp_path):
    """It is compiled for one architecture and, as nothing runs it, without optimising."""
    pytest.importorskip("ninja")
    pytest.importorskip("pybind11")
    quick = {"PROKL_CUDA_ARCHS": "80", "NVCC_APPEND_FLAGS": "-Xcicc -O0 -Xptxas -O0"}
    (wheel,) = build(clone, "--wheel", PROKL_BUILD_CUDA="1", CUDACXX=NVCC, **quick).glob("*linux*.whl")
    (name,) = (name for name in contents(wheel) if Path(name).match("prokl/_C.*.so"))
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.stem.split("-")[-3:-1] == [tag, tag] and Path(name).name.startswith(f"_C.cpython-{tag[2:]}")
    (tmp_path / Path(name).name).write_bytes(contents(wheel)[name])
    script = "import sys, _C; print(_C.architectures, 'torch' in sys.modules)"
    assert run(sys.executable, "-S", "-c", script, cwd=tmp_path).split() == ["80", "False"]
    needed = run("ldd", tmp_path / Path(name).name, cwd=tmp_path)
    assert "libc.so" in needed and "cuda" not in needed
