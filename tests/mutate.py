"""Break the library in many small ways, drawn with a seed, and list which of them no test notices.

    python tests/mutate.py --list          print the drawn mutations as diffs, run nothing
    python tests/mutate.py --out FILE.csv  run the tests nearest to each, rows go to FILE.csv

A third each comes from prokl/, kernels/ and csrc/; within one, every kind of mutation is as likely as the next.
Tests run in a clone of the last commit, without the slow ones. What survives the nearest ones may fail others.
Rows that FILE.csv has already are not run again.
"""

import argparse
import ast
import csv
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("prokl", "kernels", "csrc")
KINDS = ("operator", "sign", "constant", "index", "drop")
SWAPPED = {"+": "-", "-": "+", "*": "/", "/": "*", "@": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
CORE = ("batched_step", "against_paper", "kl_golden", "contract", "bad_gradients")
"""Tests of whole steps, which come after those that name the file."""
COLUMNS = ("mutation", "file", "line", "kind", "verdict", "by", "diff")


@dataclass(frozen=True)
class Mutation:
    file: str
    line: int
    kind: str
    old: str
    """The line without its indentation; and what takes its place."""
    new: str

    def diff(self):
        return f"{self.file}:{self.line} ({self.kind})\n- {self.old}\n+ {self.new}"


# Where a file can be mutated: (line, first column, end column, kind, replacement)


def python_sites(text):
    """Sites of operators, signs, constants, indices and statements that stand on one line of Python source."""
    lines, tree = text.splitlines(), ast.parse(text)
    in_index, bounds, skipped = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            in_index.update(ast.walk(node.slice))
            bounds.update(bounds_of(node.slice) if not is_type(node.value) else ())
        if isinstance(node, ast.JoinedStr):
            skipped.update(ast.walk(node))  # positions within an f-string are those of the source from 3.12 on only
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            skipped.update(ast.walk(annotation) if annotation else ())
    for node in ast.walk(tree):
        if node in skipped or not hasattr(node, "lineno") or node.lineno != node.end_lineno:
            continue
        row, start, end = node.lineno, node.col_offset, node.end_col_offset
        source = lines[row - 1]
        if not source.isascii():
            continue  # columns are counted in bytes
        if isinstance(node, (ast.BinOp, ast.Compare)):
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.left, node.comparators[0])
            between = re.search(r"<=|>=|[-+*/@<>]", source[left.end_col_offset : right.col_offset])
            if between and source[left.end_col_offset : right.col_offset].strip("() ") in SWAPPED:
                at = left.end_col_offset + between.start()
                yield row, at, at + len(between[0]), "operator", SWAPPED[between[0]]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield row, start, end, "sign", source[node.operand.col_offset : node.operand.end_col_offset]
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            changed = more(node.value)
            yield row, start, end, "index" if node in in_index else "constant", changed
        elif isinstance(node, ast.Name) and node in bounds:
            yield row, start, end, "index", f"{node.id} + 1"
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Return)) and isinstance(node.value, ast.BinOp):
            value = node.value
            yield row, value.col_offset, end, "sign", f"-({source[value.col_offset : end]})"
        dropped = isinstance(node, (ast.Assign, ast.AugAssign, ast.Raise, ast.Continue, ast.Expr))
        if (
            dropped
            and source.strip() == source[start:end]
            and not isinstance(getattr(node, "value", None), ast.Constant)
        ):
            yield row, start, end, "drop", "pass"


def bounds_of(index):
    """What stands by itself in an index: i and n of x[i, :n]."""
    for part in index.elts if isinstance(index, ast.Tuple) else [index]:
        yield from (part.lower, part.upper) if isinstance(part, ast.Slice) else (part,)


def is_type(node):
    return isinstance(node, ast.Name) and (node.id[0].isupper() or node.id in ("tuple", "list", "dict", "set"))


def more(value):
    """The constant changed: True to False and back, a whole number to the next, another to its double."""
    if isinstance(value, bool):
        return str(not value)
    return str(value + 1) if isinstance(value, int) else str(2 * value or 1.0)


def cuda_sites(text):
    """The same sites of C++ source; what of them does not compile is for the caller to leave out."""
    for row, source in enumerate(text.splitlines(), 1):
        code = re.sub(r'"[^"]*"', lambda m: '"' * len(m[0]), source)
        code = code.split("//")[0].rstrip()
        if not code or code.lstrip().startswith(("#", "template", "static_assert", "using")):
            continue
        for found in re.finditer(r"(?<=[\w)\]] )(<=|>=|[-+*/<>])(?= [\w(\-!&*])", code):
            yield row, *found.span(), "operator", SWAPPED[found[0]]
        for found in re.finditer(r"(?:(?<=[=(,?:] )|(?<=\()|(?<=return ))-(?=[\w(])", code):
            yield row, *found.span(), "sign", ""
        for found in re.finditer(r"(?<==|\+|-|\*) ?(?<== )([^;{}=]+)(?=;$)", code):
            yield row, *found.span(1), "sign", f"-({found[1]})"
        for found in re.finditer(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])", code):
            number = float(found[0]) if re.search(r"[.e]", found[0]) else int(found[0])
            inside = code[: found.start()].count("[") > code[: found.start()].count("]")
            yield row, *found.span(), "index" if inside else "constant", more(number)
        for found in re.finditer(r"\[([^\[\]]*[a-z_][^\[\]]*)\]", code):
            yield row, *found.span(1), "index", f"{found[1]} + 1"
        statement = code.strip()
        whole = statement.endswith(";") and statement.count("(") == statement.count(")") and "{" not in statement
        if whole and not re.match(r"(return|const|constexpr|static|auto|int|float|double|T|Index|break)\b", statement):
            yield row, len(code) - len(code.lstrip()), len(code), "drop", ";"


def sources(folder):
    files = (ROOT / folder).rglob("*")
    suffixes = {".cu", ".cuh", ".h", ".cpp"} if folder == "csrc" else {".py"}
    inside = sorted(f for f in files if f.suffix in suffixes)
    return [f for f in inside if folder != "prokl" or "kernels" not in f.relative_to(ROOT).parts]


def sites(folder):
    """Mutations of one folder by kind."""
    found = {kind: [] for kind in KINDS}
    for path in sources(folder):
        text = path.read_text()
        lines = text.splitlines()
        for row, start, end, kind, new in (cuda_sites if folder == "csrc" else python_sites)(text):
            line = lines[row - 1]
            changed = (line[:start] + new + line[end:]).strip()
            found[kind].append(Mutation(str(path.relative_to(ROOT)), row, kind, line.strip(), changed))
    return found


def draw(count, seed):
    """``count`` mutations, a third from each folder and as many of each kind as of the others, on different lines."""
    drawn, pick = [], random.Random(seed)
    for f, folder in enumerate(FOLDERS):
        by_kind = sites(folder)
        for found in by_kind.values():
            pick.shuffle(found)
        wanted, taken = count // 3 + (f < count % 3), []
        kinds = list(KINDS)
        while len(taken) < wanted and kinds:
            kind = kinds.pop(0)
            while by_kind[kind]:
                mutation = by_kind[kind].pop()
                taken_lines = {(m.file, m.line) for m in taken}
                if (mutation.file, mutation.line) not in taken_lines and compiles(mutation):
                    taken.append(mutation)
                    kinds.append(kind)
                    break
        drawn += taken
    return drawn


def applied(tree, mutation):
    """The text of the mutated file in a tree, and what the mutation makes of it."""
    text = (tree / mutation.file).read_text()
    lines = text.splitlines(keepends=True)
    lines[mutation.line - 1] = lines[mutation.line - 1].replace(mutation.old, mutation.new)
    return text, "".join(lines)


def compiles(mutation):
    path, (text, mutant) = ROOT / mutation.file, applied(ROOT, mutation)
    if path.suffix == ".py":
        try:
            return ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(text))
        except SyntaxError:
            return False
    from tests import host_extension

    with tempfile.TemporaryDirectory() as scratch:
        for other in sources("csrc"):
            (Path(scratch) / other.name).write_text(mutant if other == path else other.read_text())
        flags = (*host_extension.FLAGS, f"-I{host_extension.HOST_CUDA}", *host_extension.extension_flags())
        checked = path.name if path.suffix in (".cpp", ".cu") else "qr_float.cu"  # which includes every header
        command = [host_extension.COMPILER, *flags, "-w", "-fsyntax-only", "-x", "c++", Path(scratch) / checked]
        return subprocess.run(command, capture_output=True).returncode == 0


# Running


def nearest(tree, mutation):
    """List test files named after the mutated one or its folder, or that speak of it, then those of whole steps."""
    file = tree / mutation.file
    stem = file.stem
    tests = sorted((tree / "tests").glob("test_*.py"))
    tests = [t for t in tests if not re.match(r"test_(bench|experiments|pretrain|gpu|aot|csrc)", t.name)]
    named = [t for t in tests if stem in t.stem or file.parent.name in t.stem]
    module = r"extension_on_cpu" if mutation.file.startswith("csrc") else rf"\b{re.escape(stem)}\b"
    speaking = sorted((t for t in tests if re.search(module, t.read_text())), key=lambda t: t.stat().st_size)
    core = [tree / "tests" / f"test_{name}.py" for name in CORE]
    if mutation.file.startswith("kernels"):
        core = [tree / "tests" / "test_triton_step.py"]
    elif mutation.file.startswith("csrc"):
        core = []
    return [test for test in dict.fromkeys([*named, *speaking[:4], *core]) if test.exists()]


def pytest(tree, arguments, limit):
    """Exit status (None where the time was over) and output of pytest in a tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = child.communicate(timeout=limit)
        return child.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return None, child.communicate()[0]


def failures(said):
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)


def alone(tree, mutation, arguments, limit):
    """The verdict of these tests on a mutation, and the test that gave it."""
    path, (text, mutant) = tree / mutation.file, applied(tree, mutation)
    path.write_text(mutant)
    try:
        status, said = pytest(tree, ["-x", *arguments], limit)
    finally:
        path.write_text(text)
    if status == 0:
        return "survived", ""
    if status in (4, 5):
        raise RuntimeError(f"pytest ran no test (status {status}):\n{said[-2000:]}")
    return "killed", "time limit" if status is None else (failures(said) or [f"exit status {status}"])[0]


def clone(scratch):
    """Clone the last commit, without test files that cannot even be collected there."""
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(scratch)], check=True)
    _, said = pytest(scratch, ["tests", "--collect-only"], None)
    for name in failures(said):
        print(f"left out: {name}", flush=True)
        (scratch / name).unlink()
    return scratch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--out", type=Path, help="rows, one for each mutation")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests nearest to a mutation")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mutations to run (default: all)")
    options = parser.parse_args()
    if not options.list and not options.out:
        parser.error("give --list, or --out FILE.csv for the rows")

    drawn = draw(options.count, options.seed)
    numbers = range(len(drawn)) if options.only is None else options.only
    if options.list:
        for i in numbers:
            print(f"{i} {drawn[i].diff()}")
        return

    rows = {}
    if options.out.exists():
        with options.out.open(newline="") as stream:
            rows = {int(row["mutation"]): row for row in csv.DictReader(stream)}

    with tempfile.TemporaryDirectory() as folder:
        scratch = clone(Path(folder) / "tree")
        for i in numbers:
            if i in rows:
                continue
            m = drawn[i]
            verdict, by = alone(scratch, m, nearest(scratch, m), options.limit)
            print(f"{i} {m.diff()}\n  {verdict} {by}", flush=True)
            rows[i] = dict(zip(COLUMNS, (i, m.file, m.line, m.kind, verdict, by, m.diff()), strict=True))
            with options.out.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, COLUMNS)
                writer.writeheader()
                writer.writerows(rows[n] for n in sorted(rows))
    print(Counter((row["file"].split("/")[0], row["verdict"]) for row in rows.values()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
