"""The folders are layers: imports run one way, and no modules import each other in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "prokl"
LAYERS = {  # folder or module of prokl -> those that it may import
    "pair": set(),  # what both multiply
    "kernels": {"pair"},
    "algorithm": {"pair"},
    "backends": {"algorithm", "kernels", "pair"},
    "engine": {"algorithm", "backends"},
    "routing": {"algorithm"},
    "diagnostics": {"algorithm", "backends", "engine", "matrix_optimizer"},
    "distributed": {"algorithm", "backends", "engine"},
    "matrix_optimizer": {"algorithm", "distributed", "engine"},
    "optimizer": {"algorithm", "engine", "matrix_optimizer"},
    "ops": {"backends"},
    "cuda_qr": {"backends"},
    "doctor": {"backends", "ops", ""},
    "": {"cuda_qr", "diagnostics", "ops", "optimizer", "routing"},  # prokl/__init__.py
}


def modules():
    paths = [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")]
    parts = {path: (*path.relative_to(PACKAGE).parts[:-1], path.stem) for path in paths}
    return {".".join(p for p in name if p != "__init__"): path for path, name in parts.items()}


def imported(path, known):
    """Modules of prokl that a module imports anywhere in it, relative to the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "prokl":
                inside = name.removeprefix("prokl").removeprefix(".")
                found.add(inside if inside in known else inside.rpartition(".")[0])
    return found


def test_imports_run_one_way_between_the_layers_and_in_no_circle():
    known = modules()
    graph = {name: imported(path, known) for name, path in known.items()}
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if (there := other.split(".")[0]) != (here := name.split(".")[0]) and there not in LAYERS[here]
    ]
    assert not wrong
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert len(graph) > 40 and {name.split(".")[0] for name in graph} == LAYERS.keys()
