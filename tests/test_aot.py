"""Compilation ahead of time: every kernel is in it, its checks can fail, and it specialises as the JIT does."""

import csv
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.aot import ARCHITECTURES, Row, complaints
from bench.compiled.launches import Launch, Pointer, describe
from bench.micro.kernel_cases import CASES, STAGE_BYTES
from prokl.kernels.launch import Tile

ROOT = Path(__file__).parent.parent
FILES = sorted(path for path in (ROOT / "kernels").glob("*.py") if path.stem != "launch")
KERNELS = {name for path in FILES for name in re.findall(r"@triton\.jit\ndef (\w+)_kernel\(", path.read_text())}


def run(*arguments, timeout=1800):
    """Run Python on ``arguments`` without a GPU and without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=timeout)


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_every_kernel_compiles_and_passes_the_checks(tmp_path):
    done = run("-m", "bench.aot", "--out", str(tmp_path / "aot.csv"))
    assert done.returncode == 0, done.stderr
    rows, committed = read(tmp_path / "aot.csv"), read(ROOT / "bench" / "results" / "aot.csv")
    assert list(rows[0])[:6] == ["kernel", "config", "arch", "registers", "shared", "stack"]
    assert {(row["kernel"], int(row["arch"])) for row in rows} == {(k, arch) for k in KERNELS for arch in ARCHITECTURES}

    def compiled(table):
        return [(row["kernel"], row["config"], row["arch"]) for row in table]

    assert len(set(compiled(rows))) == len(rows)
    assert compiled(committed) == compiled(rows), "run python -m bench.aot --out bench/results/aot.csv"


def test_every_file_has_cases_and_every_tile_is_compiled():
    modules = {case.module.__name__.rpartition(".")[2]: case.module for case in CASES}
    assert set(modules) == {path.stem for path in FILES}
    assert len({case.name for case in CASES}) == len(CASES)
    for module in modules.values():
        lists = [value for name, value in vars(module).items() if name.startswith("TILES")]
        shipped = {tile for tiles in lists for tile in tiles}
        assert all(isinstance(tile, Tile) for tile in shipped)
        cases = [case for case in CASES if case.module is module]
        assert shipped <= {tile for case in cases for dtypes in case.dtypes for tile in case.tiles(dtypes)}


def test_every_kernel_with_products_has_its_loads_counted():
    with_products = {
        name
        for path in FILES
        for name in re.findall(r"@triton\.jit\ndef (\w+)_kernel\(", path.read_text())
        if "tl.dot" in path.read_text()
    }
    assert set(STAGE_BYTES) == with_products


HALF = torch.bfloat16
PRODUCT = Launch(
    "prokl.kernels.product",
    "product_kernel",
    (Pointer(HALF, 0), Pointer(HALF, 0), Pointer(HALF, 0), 768, 768, 1, 0, 3 * 2**31, 1, 768),
    (
        *{"HAS_C": True, "ENERGY": False, "OPERAND": "bf16", "PRECISION": "ieee"}.items(),
        *{"TILE_M": 128, "TILE_N": 128, "TILE_K": 64, "num_warps": 8, "num_stages": 3}.items(),
    ),
    ("A_ptr", "B_ptr", "D_ptr", "M", "N", "K", "stride_x_b", "stride_A_b", "stride_A_m", "stride_A_k"),
)
STAGE = 2 * (128 + 128) * 64
GOOD = Row("product", "", 90, 128, 3 * STAGE + 64, 0, "wgmma cp.async", "")


def test_a_good_kernel_has_no_complaints():
    assert complaints(GOOD, PRODUCT) == []
    assert complaints(replace(GOOD, arch=80, shared=2 * STAGE, instructions="mma cp.async"), PRODUCT) == []
    assert complaints(replace(GOOD, arch=100, instructions="tcgen05 cp.async"), PRODUCT) == []
    assert complaints(replace(GOOD, kernel="stack", shared=0, instructions=""), PRODUCT) == []


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"stack": 8}, "spill: 8 bytes"),
        ({"shared": 227 * 1024 + 1}, "there are 232448"),
        ({"shared": 163 * 1024 + 1, "arch": 80, "instructions": "mma cp.async"}, "there are 166912"),
        ({"instructions": "wgmma cp.async trap"}, "traps"),
        ({"instructions": "mma cp.async"}, "no wgmma"),
        ({"instructions": "cp.async", "arch": 100}, "no tensor cores"),
        ({"instructions": "wgmma"}, "no cp.async"),
        ({"shared": 3 * STAGE - 1}, f"3 stages take {3 * STAGE}"),
        ({"shared": 2 * STAGE - 1, "arch": 80, "instructions": "mma cp.async"}, f"3 stages take {2 * STAGE}"),
    ],
)
def test_each_check_can_fail(change, complaint):
    found = complaints(replace(GOOD, **change), PRODUCT)
    assert len(found) == 1 and complaint in found[0]


def test_odd_sizes_need_no_pipeline_but_may_not_spill():
    odd = replace(PRODUCT, arguments=(*PRODUCT.arguments[:3], 517, *PRODUCT.arguments[4:]))
    assert complaints(replace(GOOD, instructions=""), odd) == []
    assert len(complaints(replace(GOOD, stack=8), odd)) == 1


def test_exact_float32_operands_need_no_wgmma_and_float64_ones_no_tensor_cores():
    for operand, precision, instructions, fine in (
        ("fp32", "ieee", "mma cp.async", True),
        ("fp32", "tf32x3", "mma cp.async", False),
        ("fp32", "tf32x3", "wgmma cp.async", True),
        ("fp64", "ieee", "cp.async", True),
    ):
        other = replace(PRODUCT, constants=(*PRODUCT.constants, ("OPERAND", operand), ("PRECISION", precision)))
        assert (complaints(replace(GOOD, instructions=instructions), other) == []) == fine


def test_a_configuration_names_all_that_is_specialised():
    assert describe(PRODUCT) == ("128x128x64 8 warps 3 stages bf16 has_c operand=bf16 ieee K:1 A[16L 1 16]")


SPECIALISATION = """
import re, torch
from bench.aot import build
from bench.compiled.launches import Shapes, recording
from prokl.kernels.eigenvalue_ema import eigenvalue_ema
from prokl.kernels.launch import start

with recording() as launches:
    draw = Shapes()
    def f(*shape): return draw(*shape, dtype=torch.float32)
    one, huge = f(3), f(1, 1).as_strided((3, 768), (2**31, 1))
    state = f(3, 768), f(99).as_strided((3, 33), (1, 3)), f(7).narrow(0, 1, 3)
    per_weight = dict.fromkeys(("eps", "ceiling_L", "ceiling_S", "ceiling_mu"), one)
    eigenvalue_ema(*state, huge, f(3, 33), f(3, 768), beta2=0.9, n=1000, **per_weight, live=one > 0)
signature = build(launches[0], 90).asm["ttir"].split("tt.func public")[1].split("attributes")[0]
for name, rest in re.findall(r"%(\\w+): ([^%]*)", signature):
    print(name, "aligned" if "tt.divisibility = 16" in rest else "any", re.match(r"[\\w.<>!]+", rest)[0])
"""


@pytest.mark.slow
def test_arguments_are_specialised_as_the_jit_does_it():
    done = run("-c", SPECIALISATION)
    assert done.returncode == 0, done.stderr
    found = {name: (kind, dtype) for name, kind, dtype in map(str.split, done.stdout.splitlines())}
    assert found["s_L_ptr"] == ("aligned", "!tt.ptr<f32>")
    assert found["s_mu_ptr"] == ("any", "!tt.ptr<f32>")  # its storage starts one element earlier
    assert found["live_ptr"] == ("aligned", "!tt.ptr<i1>")
    assert found["M"] == ("aligned", "i32") and found["R"] == ("any", "i32")
    assert found["beta2"] == found["N"] == ("any", "f64")
    assert found["stride_s_L_b"] == ("aligned", "i32") and found["stride_ell_b"] == ("aligned", "i64")
    assert found["stride_s_S_r"] == ("any", "i32")  # 3: transposed
    assert not {"stride_s_L_m", "stride_s_S_b", "stride_live_b", "HAS_LIVE", "TILE"} & set(found)  # 1, or constexpr


FAILING = """
import sys
from dataclasses import replace
from bench import aot
from bench.micro.case import Sizes
from prokl.kernels.launch import Tile

if __name__ == "__main__":
    case = next(case for case in aot.CASES if case.name == "product Q X")
    aot.CASES = (replace(case, tiles=lambda dtypes: (TILE,)),)
    aot.SIZES = SIZES
    sys.exit(aot.main(["--arch", "90"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "tile, sizes, complaint",
    [
        ("Tile(256, 256, 64, 8, 2)", "Sizes(48, 768, 3072, 128)", "registers spill"),
        ("Tile(64, 64, 64, 4, 4)", "Sizes(48, 767, 3071, 127)", "loads do not run ahead"),
        ("Tile(128, 256, 64, 8, 5)", "Sizes(48, 768, 3072, 128)", "of shared memory; there are"),
        ("Tile(100, 64, 64, 4, 4)", "Sizes(48, 768, 3072, 128)", "does not compile"),
    ],
    ids=["spill", "unaligned", "shared", "invalid"],
)
def test_the_command_fails_and_names_the_offender(tile, sizes, complaint, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.replace("TILE", tile).replace("= SIZES", f"= {sizes}"))
    done = run(str(script))
    assert done.returncode == 1, done.stderr
    assert re.search(rf"^product \({tile[5:8].strip(',')}.*on sm_90: .*{complaint}", done.stderr, re.MULTILINE)


@pytest.mark.slow
def test_the_interpreter_is_refused():
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "bench.aot"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "unset it" in done.stderr
