"""A tiny language model with every kind of weight, and its training alone, under DDP and under FSDP2, step by step.

The batch of a step follows from the step, and each rank takes its part of it, so that all ways of training see the same
data. Some weights come late, are missing in some steps or get gradients that are not finite, by the step as well.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy, linear, pad
from torch.nn.parallel import DistributedDataParallel

import prokl

VOCABULARY, WIDTH, SEQUENCES, LENGTH = 24, 12, 8, 8  # 64 tokens a step, more than any side of a matrix
LATE = 7  # the first call that uses `late`
ABSENT = (4, 5, 8)  # calls that do not use `sometimes`
BAD = (3, 9)  # calls in which the first sequence makes gradients of `layers.1` and one of the experts infinite
STEPS = 12  # beyond the last of these, and three refreshes


class Poison(torch.autograd.Function):
    """The identity, whose gradient is infinite wherever a mask says so."""

    @staticmethod
    def forward(ctx, value, mask):
        ctx.save_for_backward(mask)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return torch.where(mask, torch.inf, gradient), None


class Layer(nn.Module):
    """A residual layer of one square matrix."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.square = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, poisoned=False):
        weight = self.square.weight
        if poisoned:
            weight = Poison.apply(weight, torch.ones_like(weight, dtype=torch.bool))
        return x + torch.tanh(linear(self.norm(x), weight, self.square.bias))


class Mixed(nn.Module):
    """What has other shapes: fused and split, wide, five rows, a stack of seven, a convolution."""

    def __init__(self, wide):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # of a key's the gradient is noise alone
        self.up = nn.Linear(WIDTH, wide)
        self.down = nn.Linear(wide, WIDTH, bias=False)
        self.five = nn.Linear(WIDTH, 5)
        self.back = nn.Linear(5, WIDTH, bias=False)
        self.experts = nn.Parameter(torch.randn(7, 9, WIDTH) / WIDTH**0.5)
        self.register_buffer("mix", torch.randn(7, WIDTH, 9) / 8)
        self.conv = nn.Conv2d(WIDTH, 6, (3, 1), padding=(1, 0))

    def forward(self, x, poisoned=False):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.back(torch.tanh(self.five(x)))
        experts = self.experts
        if poisoned:
            experts = Poison.apply(experts, torch.arange(7).view(7, 1, 1).eq(2).expand_as(experts))
        hidden = torch.tanh(torch.einsum("bti,eoi->bteo", x, experts))
        x = x + torch.einsum("bteo,eio->bti", hidden, self.mix)
        return x + pad(self.conv(x.mT.unsqueeze(-1)).squeeze(-1).mT, (0, WIDTH - 6))


class Model(nn.Module):
    """Embedding, four equal layers and the mixed one, a late and an absent weight, head."""

    def __init__(self, wide=40):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.mixed = Mixed(wide)
        self.late = nn.Linear(WIDTH, WIDTH, bias=False)
        self.sometimes = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, call, poisoned=False):
        """Return the logits; ``poisoned`` where some gradients are to be infinite."""
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, poisoned and i == 1)
        x = self.mixed(x, poisoned)
        if call >= LATE:
            x = x + torch.tanh(self.late(x))
        if call not in ABSENT:
            x = x + torch.tanh(self.sometimes(x))
        return self.head(self.norm(x))


def batch(call):
    """Return the tokens of a step, with what follows each of them."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1000 + call))
    return tokens, (3 * tokens + tokens.roll(1, 1)) % VOCABULARY


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        how: "alone", "ddp" (divided), "fsdp", "fsdp-kept" (reshard_after_forward=False), "hsdp" (2x2 mesh).
        method: "pro" or "kl". dtype: of the weights. settings: of the optimizer.
        order: alone, the parts of the batch whose gradients are summed, in this order; () for one batch.
        wide: length of the longest side.
        convolution: whether KL-Shampoo takes the convolution, too, as Pro-KLShampoo does.
        apart: whether each matrix weight has a group of its own, with its own lr and weight decay.
    """

    how: str = "alone"
    method: str = "pro"
    dtype: torch.dtype = torch.float64
    settings: dict = field(default_factory=dict)
    order: tuple = ()
    wide: int = 40
    convolution: bool = False
    apart: bool = False


class Run:
    """A model and its optimizer, in the middle of training."""

    def __init__(self, plan):
        self.plan = plan
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = Model(plan.wide).to(plan.dtype)
        self.called = self.model
        if plan.how in ("fsdp", "fsdp-kept", "hsdp"):
            shape = (2, 2) if plan.how == "hsdp" else (dist.get_world_size(),)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for module in (*self.model.layers[:2], self.model.mixed, self.model):
                fully_shard(module, mesh=mesh, reshard_after_forward=plan.how != "fsdp-kept")
        elif plan.how == "ddp":
            self.called = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = optimizer_of(self.model, plan)

    def backward(self, call):
        """Leave the gradients of a step in the model; return its loss over the whole batch."""
        tokens, targets = batch(call)
        alone = self.plan.how == "alone"
        parts = self.plan.order or (0,)
        count = len(parts) if alone else dist.get_world_size()
        total = 0.0
        self.called.zero_grad()
        for part in parts if alone else [dist.get_rank()]:
            x, y = tokens.chunk(count)[part], targets.chunk(count)[part]
            poisoned = call in BAD and part == 0
            loss = cross_entropy(self.called(x, call, poisoned).flatten(0, 1).to(torch.float64), y.flatten())
            (loss / (count if alone else 1)).backward()
            total = total + loss.detach() / count
        if not alone:
            dist.all_reduce(total)
        return total.item()

    def train(self, first, last):
        """Do steps ``first`` to ``last``; return their losses."""
        losses = []
        for call in range(first, last):
            losses.append(self.backward(call))
            self.optimizer.step()
        return losses

    def weights(self):
        """Return all weights, whole, in NumPy's float64, which holds each of our dtypes exactly; needs all ranks."""
        return {name: exact(whole(p)) for name, p in self.model.named_parameters()}


def optimizer_of(model, plan):
    """Return the optimizer of a model under a plan."""
    pro = plan.method == "pro"
    # KL-Shampoo's start of the convolution, whose six rows leave most of the long side to rounding, is not determined:
    # runs in one process that sum gradients in other orders end 1e-3 apart.
    own = {"rank": 3} if pro else {"rank": None, "adamw": [] if plan.convolution else ["*.conv.weight"]}
    groups = prokl.param_groups(model, lr=0.02 if pro else 0.005, adamw_lr=3e-3, split={"*.qkv.weight": 3}, **own)
    if plan.apart:
        groups = [own for group in groups for own in one_by_one(group)]
    settings = {"precondition_frequency": 3, **plan.settings}
    for group in groups:
        if group["algorithm"] == "matrix" and "rank" in settings:
            group["rank"] = settings["rank"]
    settings.pop("rank", None)
    if plan.how == "ddp":
        settings["process_group"] = dist.group.WORLD
    return (prokl.ProKLShampoo if pro else prokl.KLShampoo)(groups, **settings)


def one_by_one(group):
    """Return a matrix group as groups of one weight each, no two with one lr; an AdamW group as it is."""
    if group["algorithm"] == "adamw":
        return [group]
    found = []
    for i, entry in enumerate(group["params"]):
        lists = {key: value[i] for key, value in group.items() if isinstance(value, list)}
        found.append({**group, **lists, "params": [entry], "lr": group["lr"] / (1 + i / 4), "weight_decay": 0.05 * i})
    return found


def given(plan, steps):
    """Train on gradients that every rank is given whole, so that no sum rounds them; return the outcome."""
    run = Run(plan)
    for call in range(steps):
        generator = torch.Generator().manual_seed(call)
        for name, p in run.model.named_parameters():
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            absent = (name == "late.weight" and call < LATE) or (name == "sometimes.weight" and call in ABSENT)
            if call in BAD and name == "mixed.experts":
                g[2, 0, 0] = torch.nan
            if isinstance(p, DTensor):
                g = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = None if absent else g
        run.optimizer.step()
    return outcome(run, [])


def whole(t):
    """Return a tensor whole, wherever it lies; needs all ranks."""
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


def exact(t):
    """Return a tensor's values in NumPy's float64."""
    return t.detach().to(torch.float64).cpu().numpy()


@dataclass
class Outcome:
    """What training led to.

    Attributes:
        losses: of every step. weights: whole, at the end. skipped, clipped: as the optimizer says on this rank.
    """

    losses: list
    weights: dict
    skipped: dict
    clipped: dict


def outcome(run, losses):
    """Return what a run has come to; needs all ranks."""
    return Outcome(losses, run.weights(), run.optimizer.skipped(), run.optimizer.clipped())


def trained(plan, steps=STEPS):
    """Train from the start: alone in this process, otherwise on every rank of a pool."""
    run = Run(plan)
    return outcome(run, run.train(0, steps))
