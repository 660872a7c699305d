"""Handwritten digits instead of text: a small MLP-Mixer (arXiv:2105.01601) on scikit-learn's 1,797 of 8x8 pixels.

A task beyond language models for defaults that were chosen on these. Seeds share the division into training and test
images, the start and the batches.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import rows
from bench.optimizers import Hyper, build
from bench.training.schedules import linear

PATCH, PATCHES, WIDTH, LAYERS = 2, 16, 64, 3
TEST, BATCH = 500, 64


class Mixer(nn.Module):
    """One block: patches mixed channel by channel, then channels patch by patch."""

    def __init__(self) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(PATCHES, 4 * PATCHES), nn.GELU(), nn.Linear(4 * PATCHES, PATCHES))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, patches, width) to the same."""
        x = x + self.tokens(self.token_norm(x).mT).mT
        return x + self.channels(self.channel_norm(x))


class Model(nn.Module):
    """Patches, blocks, their mean, and ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 8, 8) images to (batch, 10) logits."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        x = self.patches(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@cache
def data() -> tuple[Tensor, Tensor]:
    """Return images (1797, 8, 8) with mean 0 and deviation 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)
    return (images - images.mean()) / images.std(), torch.tensor(found.target)


def shifted(images: Tensor, g: torch.Generator) -> Tensor:
    """Return images moved by up to a pixel in each direction, each by its own; what comes in is background."""
    n, background = len(images), float(images.min())
    padded = F.pad(images, (1, 1, 1, 1), value=background)
    down, right = (torch.randint(3, (n, 1, 1), generator=g) for _ in range(2))
    at = torch.arange(8)
    return padded[torch.arange(n)[:, None, None], down + at[:, None], right + at]


def trained(h: Hyper, seed: int, steps: int) -> tuple[float, float]:
    """Return loss, in nats, and share of errors on the test images after training."""
    images, targets = data()
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=g)
    test, training = order[:TEST], order[TEST:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model()
    optimizers = build(model, h, None)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: linear(step, steps)) for o in optimizers]
    for _ in range(steps):
        batch = training[torch.randint(len(training), (BATCH,), generator=g)]
        loss = F.cross_entropy(model(shifted(images[batch], g)), targets[batch])
        model.zero_grad()
        loss.backward()
        for it in (*optimizers, *schedules):
            it.step()
    with torch.no_grad():
        logits = model(images[test])
    return F.cross_entropy(logits, targets[test]).item(), (logits.argmax(1) != targets[test]).float().mean().item()


def figures(h: Hyper, seed: int, steps: int) -> Iterator[rows.Row]:
    """Yield test loss and test errors after training."""
    own = {"rank": h.rank, "adamw_lr": h.adamw_lr, "lr": h.lr}
    loss, errors = trained(h, seed, steps)
    for metric, of, value in (("test loss", "nats", loss), ("test errors", "share", errors)):
        yield own | {"metric": metric, "unit": of, "median": value}
