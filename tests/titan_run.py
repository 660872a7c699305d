"""Makes groups and checkpoints as torchtitan does, sharded by FSDP2, for torchrun: a resumed run is exact.

torchtitan's groups have names beside their weights, and settings of torch's AdamW whatever the optimizer is. Its older
releases flatten the state by torch's means, as test_distributed_checkpoints.py does, the newer ones by their own, as
``flat`` and ``load_flat`` do here.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prokl

OF_WEIGHTS = ("params", "param_names")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.experts = nn.Parameter(torch.randn(3, 12, 12) / 4)
        self.head = nn.Linear(12, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(q.tanh() * k + v)
        x = x + torch.einsum("...i,eij->...j", x, self.experts).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, -1).flatten())


def made(seed):
    torch.manual_seed(seed)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    adamw = {"algorithm": "adamw", "lr": 3e-3}
    groups, taken = [], set()
    for ending, settings in (("qkv.weight", {"lr": 0.02, "split": 3}), ("embedding.weight", adamw), ("bias", adamw)):
        groups.append(([n for n, _ in net.named_parameters() if n.endswith(ending)], settings))
        taken.update(groups[-1][0])
    groups.append((["head.weight"], adamw))
    groups.append(([n for n, _ in net.named_parameters() if n not in taken | {"head.weight"}], {"lr": 0.02}))
    weights, common = dict(net.named_parameters()), {"fused": True, "foreach": False}
    named = [{"params": [weights[n] for n in own], "param_names": own, **common, **more} for own, more in groups]
    return net, prokl.ProKLShampoo(named, rank=4, precondition_frequency=3)


def train(net, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(100 * step + dist.get_rank())
        net(torch.randint(16, (4, 8))).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def flat(optimizer):
    """Return an optimizer's state dict as one dict, by names of weights."""
    packed, found = optimizer.state_dict(), {}
    for group in packed["param_groups"]:
        settings = {key: value for key, value in group.items() if key not in OF_WEIGHTS}
        for place, name in zip(group["params"], group["param_names"], strict=True):
            found |= {f"state.{name}.{key}": value for key, value in packed["state"][place].items()}
            found |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return found


def load_flat(optimizer, found):
    """Load what :func:`flat` returned, of the keys that the live state has; without names in the groups."""
    state, groups = {}, []
    for group in optimizer.param_groups:
        places = []
        for p, name in zip(group["params"], group["param_names"], strict=True):
            places.append(len(state))
            state[len(state)] = {key: found[f"state.{name}.{key}"] for key in optimizer.state[p]}
        settings = [key for key in group if key not in OF_WEIGHTS]
        groups.append({"params": places} | {key: found[f"param_groups.{name}.{key}"] for key in settings})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def begin(optimizer):
    """Make the state by a step of zero gradients."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    net, optimizer = made(seed=0)
    train(net, optimizer, 0, 4)
    dcp.save({"net": net.state_dict(), **flat(optimizer)}, checkpoint_id="titan")
    train(net, optimizer, 4, 8)
    other, resumed = made(seed=1)
    begin(resumed)
    dcp.load(state := {"net": other.state_dict(), **flat(resumed)}, checkpoint_id="titan")
    load_flat(resumed, state)
    other.load_state_dict(state["net"])
    train(other, resumed, 4, 8)
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name
    if dist.get_rank() == 0:
        print("exact")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
