"""train_gpt.py: a small GPT of bytes with Pro-KLShampoo, in one process; schedule, clipping, accumulation, checkpoints.

python train_gpt.py
python train_gpt.py --resume runs/gpt/50.pt  # goes on from there, exactly
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn

import prokl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--accumulate", type=int, default=2, help="batches whose gradients are one step's")
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--folder", type=Path, default=Path("runs/gpt"))
parser.add_argument("--resume", type=Path, help="a checkpoint, as runs/gpt/50.pt")
options = parser.parse_args()
ROWS, LENGTH, WARMUP = 8, 128, 20
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.token_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, nn.LayerNorm(width), enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        return self.lm_head(self.layers(x, mask, is_causal=True))


def text():
    """Return the sources of Python's standard library as one tensor of bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch(data, number):
    """Return a batch by its number, so that a resumed run sees what it would have seen."""
    starts = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(number))
    rows = data[starts + torch.arange(LENGTH + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


def rate(step):
    """Return the factor of every group's lr: linear warmup, then a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, options.steps - WARMUP))


torch.manual_seed(0)
data, model = text(), GPT(options.width).to(device)
groups = prokl.param_groups(model, lr=0.02, adamw_lr=3e-3)  # matrices; AdamW for embeddings, head, norms and biases
print(groups)
optimizer = prokl.ProKLShampoo(groups)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
losses = []
options.folder.mkdir(parents=True, exist_ok=True)
if options.resume:
    saved = torch.load(options.resume, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    losses = saved["losses"]

for step in range(len(losses), options.steps):
    total = 0.0
    for part in range(options.accumulate):
        tokens, targets = batch(data, step * options.accumulate + part)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / options.accumulate
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(total)
    if (step + 1) % 10 == 0 or step + 1 == options.steps:
        last = losses[-10:]
        print(f"step {step + 1}: loss {sum(last) / len(last):.3f} nats a byte, mean of {len(last)} steps", flush=True)
    if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
        state = {name: part.state_dict() for name, part in parts.items()}
        path = options.folder / f"{step + 1}.pt"
        torch.save({**state, "losses": losses}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # a run that is stopped meanwhile leaves no half file of that name
print(f"checkpoints with all losses: {options.folder}")
