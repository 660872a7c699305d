"""train_ddp.py: a small language model under DDP, whose ranks divide the optimizer's step and state.

torchrun --nproc-per-node 2 train_ddp.py
torchrun --nproc-per-node 4 train_ddp.py --resume runs/ddp/50  # on any number that divides the batch
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import prokl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--folder", default="runs/ddp")
parser.add_argument("--resume", help="a checkpoint, as runs/ddp/50")
parser.add_argument("--width", type=int, default=256)
options = parser.parse_args()
if "RANK" not in os.environ:
    parser.error("torchrun starts it: torchrun --nproc-per-node 2 train_ddp.py")
VOCABULARY, LENGTH, ROWS = 256, 32, 32  # rows of a batch, of all ranks together

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x, target = self.embedding(tokens[:, :-1]), tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits = self.head(self.layers(x, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def text():
    """Return the sources of Python's standard library as one tensor of bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch(step):
    """Return this rank's rows of a step: together they are the same on any number that divides the batch."""
    starts = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return data[(starts + torch.arange(LENGTH + 1))[rank::ranks]].long().to(device)


torch.manual_seed(0)
data, model = text(), Model(options.width).to(device)
groups = prokl.param_groups(model, lr=0.02, adamw_lr=3e-3)
optimizer = prokl.ProKLShampoo(groups, process_group=dist.group.WORLD)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
parallel = DistributedDataParallel(model)


class Training(Stateful):
    """The contents of a checkpoint, of which every rank writes and reads its own part."""

    def state_dict(self):
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])


def skipped():
    """Count the gradients that were not finite: a rank counts those of what it steps. All ranks call this."""
    counts = [None] * ranks
    dist.all_gather_object(counts, optimizer.skipped())
    return {name: count for own in counts for name, count in own.items() if count}


first = 1
if options.resume:
    dcp.load({"training": Training()}, checkpoint_id=options.resume)
    first = int(os.path.basename(options.resume)) + 1
for step in range(first, options.steps + 1):
    loss = parallel(batch(step))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps:
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.SUM)
        total = skipped()
        if rank == 0:
            print(f"step {step}: loss {loss.item() / ranks:.4f} nats a byte, skipped {total or 'nothing'}", flush=True)
    if step % options.save_every == 0:
        dcp.save({"training": Training()}, checkpoint_id=f"{options.folder}/{step}")
dist.destroy_process_group()
