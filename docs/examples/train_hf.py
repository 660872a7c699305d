"""train_hf.py: a small GPT-2 of bytes with Transformers' Trainer; schedule, clipping, accumulation, checkpoints.

pip install ".[integrations]"  # in a clone of prokl: Transformers and Accelerate
python train_hf.py
python train_hf.py --resume runs/hf/checkpoint-50  # goes on from there
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import prokl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--folder", default="runs/hf")
parser.add_argument("--resume", help="a checkpoint, as runs/hf/checkpoint-50")
options = parser.parse_args()
LENGTH = 128


class Text(torch.utils.data.Dataset):
    """The sources of Python's standard library in pieces of LENGTH bytes."""

    def __init__(self):
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

    def __len__(self):
        return len(self.data) // LENGTH

    def __getitem__(self, i):
        tokens = self.data[i * LENGTH : (i + 1) * LENGTH].long()
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=options.width,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
)
groups = prokl.param_groups(model, lr=0.02, adamw_lr=3e-3)  # matrices; AdamW for embeddings, norms and biases
print(groups)
arguments = TrainingArguments(
    options.folder,
    max_steps=options.steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    lr_scheduler_type="cosine",  # scales every group's own rate; learning_rate and weight_decay are not used
    warmup_steps=10,
    save_steps=options.save_every,
    logging_steps=10,
    report_to="none",
)
trainer = Trainer(
    model, arguments, train_dataset=Text(), optimizer_cls_and_kwargs=(prokl.ProKLShampoo, {"params": groups})
)
result = trainer.train(resume_from_checkpoint=options.resume)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last; checkpoints: {options.folder}")
