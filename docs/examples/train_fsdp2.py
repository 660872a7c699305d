"""train_fsdp2.py: a Transformer made on the meta device and sharded by FSDP2, or HSDP, in bfloat16.

torchrun --nproc-per-node 2 train_fsdp2.py
torchrun --nproc-per-node 4 train_fsdp2.py --resume runs/fsdp2/50  # on any number of processes
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import prokl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--folder", default="runs/fsdp2")
parser.add_argument("--resume", help="a checkpoint, as runs/fsdp2/50")
parser.add_argument("--replicate", type=int, default=1, help="copies of the model: more than one is HSDP")
parser.add_argument("--width", type=int, default=256)
options = parser.parse_args()
if "RANK" not in os.environ:
    parser.error("torchrun starts it: torchrun --nproc-per-node 2 train_fsdp2.py")
VOCABULARY, LENGTH, ROWS, HEADS = 256, 32, 32, 4  # rows of a batch, of all ranks together

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
background = dist.new_group(backend="gloo")  # for saving while training goes on


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def initialise(self):
        for p in self.parameters():
            nn.init.ones_(p) if p.ndim == 1 else nn.init.normal_(p, std=p.shape[1] ** -0.5)


def text():
    """Return the sources of Python's standard library as one tensor of bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch(step):
    """Return this rank's rows of a step: together they are the same on any number of ranks."""
    starts = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return data[(starts + torch.arange(LENGTH + 1))[rank::ranks]].long().to(device)


shape = (options.replicate, ranks // options.replicate)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
sharding = {"mesh": mesh if options.replicate > 1 else mesh["shard"], "mp_policy": precision}
with torch.device("meta"):
    model = Model(options.width)
for block in model.blocks:
    fully_shard(block, **sharding)
fully_shard(model, **sharding)
model.to_empty(device=device)
torch.manual_seed(0)
model.initialise()
data = text()

pieces = {"split": {"*.qkv.weight": 3}, "heads": {"*.qkv.weight": HEADS}}  # q and k by heads, v whole
groups = prokl.param_groups(model, lr=0.02, adamw_lr=3e-3, **pieces)
optimizer = prokl.ProKLShampoo(groups)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))


class Training(Stateful):
    """The contents of a checkpoint, of which every rank writes and reads its own part."""

    def state_dict(self):
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])


first, saving = 1, None
if options.resume:
    dcp.load({"training": Training()}, checkpoint_id=options.resume)
    first = int(os.path.basename(options.resume)) + 1
for step in range(first, options.steps + 1):
    loss = model(batch(step))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps:
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step}: loss {loss.item() / ranks:.4f} nats a byte, norm {norm.item():.3f}", flush=True)
    if step % options.save_every == 0:
        if saving is not None:
            saving.result()
        folder = f"{options.folder}/{step}"
        saving = dcp.async_save({"training": Training()}, checkpoint_id=folder, process_group=background)
if saving is not None:
    saving.result()
dist.destroy_process_group()
