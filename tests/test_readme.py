"""Run what the documents show."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import prokl
from bench import tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GPU = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
DIAGNOSTICS = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")


def test_the_usage_diff_trains_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 11))
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert "-optimizer = torch.optim.AdamW(" in diff
    scope = {"model": model, "torch": torch}
    exec("\n".join(line[1:] for line in diff.splitlines() if line.startswith("+")), scope)
    optimizer = scope["optimizer"]
    assert isinstance(optimizer, prokl.ProKLShampoo)
    tokens = torch.arange(11)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]  # measured: 0.27


def test_the_shown_factorisation_tells_which_matrices_fell_back(extension_on_cpu):
    (block,) = re.findall(r"```python\n(from prokl import cuda_qr.*?)```", GPU, re.DOTALL)
    A = torch.randn(2, 300, 60, generator=torch.Generator().manual_seed(0))
    A[1] = 0
    scope = {"A": A}
    exec(block, scope)
    assert scope["Q"].shape == A.shape and scope["fell_back"].tolist() == [False, True]


def test_what_is_shown_of_diagnostics_logs_and_draws(tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(from prokl import diagnostics\n\nloss.*?)```", DIAGNOSTICS, re.DOTALL)
    model = nn.Linear(6, 5, bias=False)
    optimizer, logged = prokl.ProKLShampoo(model.parameters(), lr=0.02, rank=2), {}
    logger = SimpleNamespace(log=lambda values, step: logged.update({step: values}))
    for step in (0, 99, 100):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 6)) - 1).square().mean()
        exec(block, {"optimizer": optimizer, "logger": logger, "step": step, "loss": loss})
    assert list(logged) == [0, 100] and not logged[0]  # nothing has begun before the first step
    assert 0 < next(value for key, value in logged[100].items() if key.endswith("/captured_energy")) < 1
    (drawing,) = re.findall(r"```python\n(import matplotlib.*?)```", DIAGNOSTICS, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(drawing, {"diagnostics": prokl.diagnostics, "optimizer": optimizer})
    assert (tmp_path / "spectra.png").stat().st_size > 1000


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.num_heads = nn.RMSNorm(width), 12
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)


class GPT(nn.Module):
    def __init__(self, width=768, vocabulary=50304):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(12))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)


def test_the_groups_that_are_shown_are_printed_so():
    with torch.device("meta"):
        groups = prokl.param_groups(GPT(), lr=0.02, adamw_lr=3e-3)
    (shown,) = re.findall(r"```\n(parameter .*?)```", README, re.DOTALL)
    assert str(groups).rstrip() == shown.rstrip()


@pytest.mark.parametrize("page", ["index", "groups", "checkpoints"])
def test_the_blocks_of_the_guide_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        sizes = {"qkv": 18, "router": 6, "special": 6, "gate_up": 18, "lm_head": 7}
        model = nn.ModuleDict({name: nn.Linear(6, size) for name, size in sizes.items()})
        model.w1 = nn.Parameter(torch.ones(6, 4))
        wrapped = nn.ModuleDict({"block": model})
        optimizer = prokl.ProKLShampoo(prokl.param_groups(wrapped, lr=0.02, adamw_lr=3e-3))
        exec(block, {"model": wrapped, "optimizer": optimizer})


def block_of_groups(mark):
    """The block of the page of groups that has ``mark``."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "groups.md").read_text("utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if mark in block]
    return block


def test_the_shown_muon_steps_each_head_by_itself():
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(24)]), "conv": nn.Conv2d(4, 8, 3), "frozen": Block(24)})
    model["frozen"].requires_grad_(False)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2 and p.requires_grad}
    rows = {name: len(p) // (12 if name.endswith(("q.weight", "k.weight")) else 1) for name, p in matrices.items()}
    pieces = {n: [nn.Parameter(piece.clone()) for piece in p.detach().split(rows[n])] for n, p in matrices.items()}
    settings = {"lr": 0.03, "weight_decay": 0.0, "momentum": 0.9}
    alone = torch.optim.Muon([piece for its in pieces.values() for piece in its], **settings)
    scope = {"model": model}
    exec(block_of_groups("torch.optim.Muon"), scope)
    for call in range(3):
        for name, W in matrices.items():
            has = call != 1 or not name.endswith("q.weight")
            W.grad = torch.randn(W.shape) if has else None
            for i, piece in enumerate(pieces[name]):
                piece.grad = W.grad.split(rows[name])[i].clone() if has else None
        before = {name: W.detach().clone() for name, W in matrices.items()}
        alone.step()
        scope["muon"].step()
        for name, W in matrices.items():
            assert torch.equal(W, torch.cat(pieces[name])) and torch.equal(W, before[name]) == (W.grad is None)


def test_the_shown_division_gives_a_weight_its_alpha_and_pieces():
    model = nn.ModuleDict({"layers": nn.ModuleList(Block(24) for _ in range(2))})
    scope = {"model": model}
    exec(block_of_groups("alpha_kl"), scope)
    found = {}
    for group in scope["optimizer"].param_groups:
        splits = group.get("split", [None] * len(group["params"]))
        own = (group["lr"], group.get("alpha_kl"))
        found |= {name: (*own, split) for name, split in zip(group["param_names"], splits, strict=True)}
    assert found.keys() == dict(model.named_parameters()).keys()
    for i in range(2):
        assert found[f"layers.{i}.q.weight"] == found[f"layers.{i}.k.weight"] == (0.02, 1.4 / 768**0.5, 12)
        assert found[f"layers.{i}.out.weight"] == (0.02, "auto", None)
        assert found[f"layers.{i}.norm.weight"] == (3e-3, None, None)
    auto = math.sqrt(math.prod(prokl.diagnostics.alpha_kl_bracket(64, 768, 10)))
    assert 1.4 / 768**0.5 == pytest.approx(4 * auto, rel=0.02)


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda d: d.name)
def test_linked_files_exist_and_no_placeholder_is_left(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    assert not re.search(r"@[A-Z_]+@", text)


def test_every_page_with_a_recorded_table_is_compared():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert {page for page in pages if "<!-- table " in page.read_text("utf-8")} == {*tables.DOCUMENTS}


def test_public_names_are_all_mentioned():
    assert all(name in README for name in prokl.__all__)
