"""The scripts of docs/examples, run as they stand by torchrun, and what their checkpoints hold."""

import json
import shutil
import socket

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.commands import ROOT, run_python

EXAMPLES = ROOT / "docs" / "examples"


def scripts(folder):
    """Copy the examples into a folder; return their names."""
    found = sorted(EXAMPLES.glob("*.py"))
    for path in found:
        shutil.copy(path, folder)
    return [path.name for path in found]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for it in sockets:
        it.bind(("127.0.0.1", 0))
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports


def torchrun(folder, *runs, **settings):
    """Run scripts in a folder by one torchrun of two processes; return the lines that they print.

    Args:
        runs: (processes, script, arguments in one string) of each.
    """
    ports = free_ports(len(runs))
    plan = [
        {"processes": processes, "script": script, "arguments": arguments.split(), "port": port, **settings}
        for (processes, script, arguments), port in zip(runs, ports, strict=True)
    ]
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests" / "distributed_run.py"), "plan.json"]
    ended = run_python(*command, cwd=folder, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "FutureWarning" not in ended.stderr  # of what a later torch refuses
    return ended.stdout.splitlines()


def checkpoint(folder):
    """Return everything that a distributed checkpoint holds."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


def flat(value):
    """Return the tensors and numbers of nested dicts and lists by their paths."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(value)[0]}


def apart(one, other, before):
    """Return how far the weights of two runs are from each other, by how far they have gone."""
    weights = [name for name, value in one.items() if value.is_floating_point()]
    gone = sum((one[name] - before[name]).double().square().sum() for name in weights)
    between = sum((one[name] - other[name]).double().square().sum() for name in weights)
    return (between / gone).sqrt().item()


def assert_same(one, other):
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    differ = [
        path
        for path, value in one.items()
        if not (torch.equal(value, other[path]) if isinstance(value, torch.Tensor) else value == other[path])
    ]
    assert differ == []
