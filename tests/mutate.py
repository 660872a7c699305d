"""Break the library in many small ways, drawn with a seed, and list which of them no test notices.

    python -m tests.mutate --list    print the drawn mutations, run nothing
    python -m tests.mutate           run the tests nearest to each

A third each comes from prokl/, kernels/ and csrc/; within one, every kind of mutation is as likely as the next.
Tests run in a clone of the last commit, without the slow ones. One that survives the nearest may fail others.
"""

import argparse
import ast
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests import host_extension

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("prokl", "kernels", "csrc")
CORE = {
    "prokl": ("batched_step", "against_paper", "contract", "bad_gradients"),
    "kernels": ("triton_step",),
    "csrc": (),
}
"""Tests of whole steps, which come after those that name the file."""
SWAPPED = {"+": "-", "-": "+", "*": "/", "/": "*", "@": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
KINDS = {
    "operator": r"(?<=[\w)\]] )(?:<=|>=|[-+*/@<>])(?= [\w(\-!&*])",
    "sign": r"(?:(?<=[=(,?:] )|(?<=\()|(?<=return ))-(?=[\w(])|(?<= = )[^=;{}]*[-+*/@][^=;{}]*(?=;?$)",
    "constant": r"(?<![\w.\[])(?:\d+(?:\.\d+)?(?:e-?\d+)?|True|False|true|false)(?![\w.])",
    "index": r"(?<=[\w)\]]\[)(?!int|str|float|bool)(?:[a-z_]\w*|\d+)(?=\])",
    "drop": r"^(?!template|static_assert|using|import|from|def|class|const|auto|return|for|if|while|with|el)[a-z_].*",
}
"""Patterns of what is changed in a line of Python or C++, without its comment, its strings and its indentation."""


@dataclass(frozen=True)
class Mutation:
    file: str
    line: int
    kind: str
    old: str
    """The line without its indentation; and what takes its place."""
    new: str

    def __str__(self):
        return f"{self.file}:{self.line} ({self.kind})\n- {self.old}\n+ {self.new}"


def changed(kind, text):
    """Return the text that takes the place of a part of a line."""
    if kind == "operator":
        return SWAPPED[text]
    if kind == "sign":
        return "" if text == "-" else f"-({text})"
    if kind == "drop":
        return ";" if text.endswith(";") else "pass"
    if text.lower() in ("true", "false"):
        return {"True": "False", "False": "True", "true": "false", "false": "true"}[text]
    if kind == "index" and not text.isdigit():
        return f"{text} + 1"
    return str(int(text) + 1) if text.isdigit() else str(2 * float(text) or 1.0)


def code_of(path):
    """The lines of a file, with blanks in the place of comments and strings."""
    text = path.read_text()
    if path.suffix != ".py":
        return [re.sub(r'"[^"]*"|//.*', lambda found: " " * len(found[0]), line) for line in text.splitlines()]
    lines = [[*line] for line in text.splitlines()]
    left_out = {"STRING", "COMMENT", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END"}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] in left_out:
            (first, start), (last, end) = token.start, token.end
            for row in range(first, last + 1):
                part = slice(start if row == first else 0, end if row == last else None)
                lines[row - 1][part] = " " * len(lines[row - 1][part])
    return ["".join(line) for line in lines]


def sites(folder):
    """Mutations of one folder by kind."""
    found = {kind: [] for kind in KINDS}
    for path in sources(folder):
        for row, (line, code) in enumerate(zip(path.read_text().splitlines(), code_of(path), strict=True), 1):
            indentation = len(line) - len(line.lstrip())
            line, code = line.strip(), code[indentation:].rstrip()
            for kind, pattern in KINDS.items():
                for part in re.finditer(pattern, code):
                    new = line[: part.start()] + changed(kind, line[part.start() : part.end()]) + line[part.end() :]
                    found[kind].append(Mutation(str(path.relative_to(ROOT)), row, kind, line, new))
    return found


def sources(folder):
    suffixes = {".cu", ".cuh", ".h", ".cpp"} if folder == "csrc" else {".py"}
    inside = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return [path for path in inside if folder != "prokl" or "kernels" not in path.relative_to(ROOT).parts]


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
    folder = Path(mutation.file).parts[0]
    tests = sorted((tree / "tests").glob("test_*.py"))
    tests = [test for test in tests if not re.match(r"test_(bench|pretrain|gpu)", test.name)]
    named = [test for test in tests if file.stem in test.stem or file.parent.name in test.stem]
    word = "extension_on_cpu" if folder == "csrc" else rf"\b{re.escape(file.stem)}\b"
    speaking = sorted((test for test in tests if re.search(word, test.read_text())), key=lambda t: t.stat().st_size)
    core = [tree / "tests" / f"test_{name}.py" for name in CORE[folder]]
    return [*dict.fromkeys([*named, *speaking[:4], *core])]


def verdict(tree, mutation, limit):
    """Return whether the nearest tests notice a mutation, and the first that does."""
    path, (text, mutant) = tree / mutation.file, applied(tree, mutation)
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *map(str, nearest(tree, mutation))]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    path.write_text(mutant)
    child = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "killed by the time limit"
    finally:
        path.write_text(text)
    if "ImportError while loading conftest" in output:  # which the tree without the mutation passes, as main() tries
        return "killed by the import"
    if child.returncode in (4, 5):
        raise RuntimeError(f"pytest ran no test (status {child.returncode}):\n{output[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return "survived" if child.returncode == 0 else f"killed by {failed[1] if failed else child.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests nearest to a mutation")
    options = parser.parse_args()
    drawn, found = draw(options.count, options.seed), Counter()
    if options.list:
        print(*drawn, sep="\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
        subprocess.run([sys.executable, "-c", "import tests.conftest"], cwd=tree, check=True)
        for mutation in drawn:
            result = verdict(tree, mutation, options.limit)
            print(f"{mutation}\n  {result}", flush=True)
            found[mutation.file.split("/")[0], result.split()[0]] += 1
    print(found)


if __name__ == "__main__":
    main()
