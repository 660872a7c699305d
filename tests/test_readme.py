"""What the README shows is run."""

import re
from pathlib import Path

import torch
from torch import nn

import prokl

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_usage_diff_trains_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 11))
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
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


def test_the_factorisation_that_is_shown_tells_which_matrices_fell_back(extension_on_cpu):
    (block,) = re.findall(r"```python\n(from prokl import cuda_qr.*?)```", README, re.DOTALL)
    A = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0))
    A[1] = 0
    scope = {"A": A}
    exec(block, scope)
    assert scope["Q"].shape == A.shape and scope["fell_back"].tolist() == [False, True]


def test_the_removed_lines_are_adamw():
    assert "-optimizer = torch.optim.AdamW(" in README


def test_linked_files_exist():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (root / target).exists(), target


def test_no_placeholder_is_left():
    assert not re.search(r"@[A-Z_]+@", README)


def test_public_names_are_all_mentioned():
    assert all(name in README for name in prokl.__all__)
