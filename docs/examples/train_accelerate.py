"""train_accelerate.py: a small language model that Accelerate shards by FSDP2.

pip install ".[integrations]"  # in a clone of prokl: Accelerate
torchrun --nproc-per-node 8 train_accelerate.py
torchrun --nproc-per-node 4 train_accelerate.py --resume runs/accelerate/2
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DataLoaderConfiguration, DistributedType, gather_object, set_seed
from torch import nn

import prokl

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--folder", default="runs/accelerate")
parser.add_argument("--resume", help="a checkpoint, as runs/accelerate/2")
parser.add_argument("--width", type=int, default=256)
options = parser.parse_args()
VOCABULARY, LENGTH = 256, 32


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate_up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


sharding = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
    state_dict_type="SHARDED_STATE_DICT",
)
data = DataLoaderConfiguration(use_seedable_sampler=True)  # a resumed run shuffles as an uninterrupted one
accelerator = Accelerator(fsdp_plugin=sharding, dataloader_config=data)
if accelerator.distributed_type != DistributedType.FSDP:
    raise SystemExit("Accelerate shards on GPUs alone, and under torchrun; here it would train without FSDP.")
set_seed(0)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))  # of Python's standard library, as bytes
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
starts = torch.randint(len(text) - LENGTH, (512, 1))
rows = text[starts + torch.arange(LENGTH + 1)].long()
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
model = Model(options.width)
optimizer = prokl.ProKLShampoo(prokl.param_groups(model, lr=0.02, adamw_lr=3e-3, split={"*.gate_up.weight": 2}))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

first = 0
if options.resume:
    accelerator.load_state(options.resume)
    first = int(os.path.basename(options.resume))
for epoch in range(first, options.epochs):
    loader.set_epoch(epoch)
    for batch in loader:
        loss = model(batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{options.folder}/{epoch + 1}")
    loss = accelerator.reduce(loss.detach(), "mean")
    skipped = gather_object([optimizer.optimizer.skipped()])  # each rank counts those of what it steps
    total = {name: count for own in skipped for name, count in own.items() if count}
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f} nats a byte, skipped {total or 'nothing'}")
accelerator.end_training()
