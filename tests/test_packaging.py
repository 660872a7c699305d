"""Packages from a clean copy of the tree install, hold what they should, and import without more."""

import email
import re
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch

import build_page
import prokl
from tests.building import ROOT, attempt, build, clean_copy, contents, files_under, run

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("prokl", "prokl/diagnostics", "prokl/kernels")
    for path in (ROOT / folder).glob("*.py")
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A clean copy of the tree and the folder with the wheel and the sdist built from it, without the extension."""
    source = clean_copy(tmp_path_factory.mktemp("packaging") / "clone")
    return source, build(source, "--sdist", "--wheel", PROKL_BUILD_CUDA="0")


@pytest.mark.slow
def test_what_is_uploaded_passes_twine_and_says_what_it_needs(built):
    (wheel,), (sdist,) = built[1].glob("*.whl"), built[1].glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=built[1])
    assert wheel.name == f"prokl-{prokl.__version__}-py3-none-any.whl"  # without the extension for every platform
    (text,) = (text for name, text in contents(wheel).items() if name.endswith("METADATA"))
    metadata = email.message_from_bytes(text)
    required = metadata.get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == ["numpy", "torch>=2.9"]
    assert any(line.startswith("triton;") and 'extra == "dev"' in line for line in required)
    assert metadata.get_all("Project-URL") == ["Paper, https://arxiv.org/abs/2605.06316"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not build_page.LINK.search(metadata.get_payload()) and "# prokl" in metadata.get_payload()


def test_the_page_links_to_the_repository_if_it_has_an_address():
    readme = "![Loss](bench/loss.png)\nsee [docs](docs/a.md#top), [here](#below), [paper](https://arxiv.org/abs/1)"
    address = build_page.repository('[project.urls]\nPaper = "https://x.org"\nRepository = "https://y.org/p/"\n')
    assert build_page.page(readme, address) == (
        "![Loss](https://y.org/p/raw/HEAD/bench/loss.png)\n"
        "see [docs](https://y.org/p/blob/HEAD/docs/a.md#top), [here](#below), [paper](https://arxiv.org/abs/1)"
    )
    assert build_page.repository('[project.urls]\nPaper = "https://x.org"\n') is None
    assert build_page.page(readme, None) == "Loss\nsee docs, [here](#below), [paper](https://arxiv.org/abs/1)"


@pytest.mark.slow
def test_wheel_holds_the_whole_package_alone_at_top_level(built, tmp_path):
    names = set(contents(*built[1].glob("*.whl")))
    assert {name.split("/")[0] for name in names} == {"prokl", f"prokl-{prokl.__version__}.dist-info"}
    package = {name.removeprefix("prokl/") for name in names if name.startswith("prokl/")}
    assert package == files_under(clean_copy(tmp_path / "clone") / "prokl")
    assert "py.typed" in package
    assert any(name.startswith("kernels/") for name in package)


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(*built[1].glob("*.tar.gz")) as archive:
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    extension = {f"csrc/{name}" for name in files_under(ROOT / "csrc")}
    assert extension | {"build_cuda.py", "build_page.py"} <= files_under(source)
    rebuilt = build(source, "--wheel", PROKL_BUILD_CUDA="0")
    assert contents(*rebuilt.glob("*.whl")) == contents(*built[1].glob("*.whl"))


def environment_with(wheel, folder):
    """Install a wheel into an empty environment; return its Python and its packages' folder."""
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    return python, packages


def lend_torch(packages):
    """Give an environment torch and triton of the running interpreter.

    An editable prokl there stays behind: its .pth file counts only in the folder of its own environment.
    """
    (packages / "running.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")


@pytest.mark.slow
def test_wheel_installs_and_imports_in_an_empty_environment(built, tmp_path):
    python, packages = environment_with(*built[1].glob("*.whl"), tmp_path)
    lend_torch(packages)
    printed = run(
        python,
        "-I",
        "-c",
        "import importlib, importlib.metadata, sys\n"
        "import prokl\n"
        "print(prokl.__file__, prokl.__version__, importlib.metadata.version('prokl'))\n"
        "for name in sys.argv[1:]: importlib.import_module(name)",
        *MODULES,
        cwd=tmp_path,
    )
    assert printed.split() == [str(packages / "prokl" / "__init__.py"), prokl.__version__, prokl.__version__]


WITHOUT_TRITON = """
import importlib, sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
for name in sys.argv[1:]:
    importlib.import_module(name)

import torch, prokl
from bench.compile_report import __main__ as compile_report
from prokl import doctor

weight = torch.nn.Parameter(torch.ones(4, 6))
optimizer = prokl.ProKLShampoo([weight])
for _ in range(2):
    weight.square().sum().backward()
    optimizer.step()
assert not torch.equal(weight, torch.ones(4, 6))
doctor.main()
print("report", compile_report.main(["aot"]))
"""
TAKE_TRITON = re.compile(
    r"prokl\.(kernels\.|backends\.triton_(ops|pairs))"
    r"|bench\.(first|micro\.|timing\.tiles|compile_report\.(ahead|launches|trace|triton_kernels))"
)


@pytest.mark.slow
def test_without_triton_all_but_the_kernels_works():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "bench").rglob("[!_]*.py")}
    modules |= {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "prokl").rglob("[!_]*.py")}
    names = [name for name in sorted(modules) if not TAKE_TRITON.match(name)]
    wanted = {
        "prokl.doctor",
        "prokl.engine.engine",
        "bench.pretrain",
        "bench.timing.steps",
        "bench.compile_report.csrc",
    }
    assert wanted <= set(names)
    variables = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    printed = run(sys.executable, "-c", WITHOUT_TRITON, *names, cwd=ROOT, **variables)
    assert re.search("^triton  +not installed; .*: pip install triton, or a CUDA build of torch", printed, re.MULTILINE)
    assert re.search("^cpu step  +torch: a CPU takes the PyTorch form", printed, re.MULTILINE)
    assert "error: Triton is not installed: pip install triton, or choose csrc" in printed
    assert printed.endswith("report 2\n")


@pytest.mark.parametrize("command", ["egg_info", "bdist_wheel"])
def test_a_setuptools_that_is_too_old_is_named_with_the_bound(command, tmp_path):
    """An older one complains of the licence expression, over a page."""
    (tmp_path / "setuptools.py").write_text("__version__ = '70.3.0'\n")
    status, printed = attempt(sys.executable, "setup.py", command, cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert status == 1
    assert printed == (
        "error: setuptools 70.3.0 is too old to build prokl: must be at least 77. pip install -U 'setuptools>=77', or "
        "leave out --no-build-isolation.\n"
    )
    assert set(re.findall(r'"setuptools>=(\d+)"', (ROOT / "pyproject.toml").read_text())) == {"77"}


def test_the_version_is_the_changelogs_newest():
    text = (ROOT / "CHANGELOG.md").read_text()
    newest, *_ = re.findall(r"^## \[?([0-9][^\]\s]*)", text, flags=re.MULTILINE)
    coming = prokl.__version__.removesuffix(".dev0")
    assert ("## [Unreleased]" in text) == (coming != prokl.__version__) == (coming != newest)
    assert [int(part) for part in coming.split(".")] >= [int(part) for part in newest.split(".")]


def test_no_file_names_a_place_on_the_machine_it_was_written_on(tmp_path):
    machine = re.compile(rb"/(?:home|opt|root|tmp|Users|work)/")
    tree = clean_copy(tmp_path / "clone")
    assert [name for name in sorted(files_under(tree)) if machine.search((tree / name).read_bytes())] == []


@pytest.mark.slow
def test_type_checkers_see_the_types_of_an_editable_install(tmp_path):
    """They read paths that .pth files name, and know of no finders; new modules are there without another install."""
    source = clean_copy(tmp_path / "clone")
    build_it = "from setuptools import build_meta; build_meta.build_editable('made')"
    (source / "made").mkdir()
    run(sys.executable, "-c", build_it, cwd=source, PROKL_BUILD_CUDA="0")
    python, packages = environment_with(*source.glob("made/*.whl"), tmp_path)
    (source / "prokl" / "later.py").write_text("ANSWER: int = 42\n")
    (tmp_path / "use.py").write_text(
        "import prokl\nimport prokl.later\n"
        "reveal_type(prokl.ProKLShampoo)\nreveal_type(prokl.later.ANSWER)\nprokl.ProKLShampoo([], momentum='fast')\n"
    )
    quick = ("--follow-imports", "silent", "--ignore-missing-imports")  # torch is not there: it takes long to read
    mypy = (sys.executable, "-m", "mypy", "--python-executable", python, *quick, "use.py")
    status, printed = attempt(*mypy, cwd=tmp_path, PYTHONPATH="", MYPYPATH="")
    assert status == 1 and 'Revealed type is "int"' in printed, printed
    assert 'Argument "momentum" to "ProKLShampoo" has incompatible type "str"' in printed
    tops = "import importlib.util as u; print([n for n in ('kernels', 'bench', 'tests', 'setup') if u.find_spec(n)])"
    lend_torch(packages)
    printed = run(python, "-I", "-c", f"import prokl.kernels, prokl.later; {tops}", cwd=tmp_path)
    assert printed == "[]\n"
