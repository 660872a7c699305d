"""Runs scripts one after another in the processes that torchrun started: ``tests/distributed_run.py PLAN``.

PLAN is a JSON list of runs: the script, its arguments, of how many processes it is, and a free port for these to meet.
With ``"accelerate_on_cpu": true`` Accelerate takes an FSDP plugin on a CPU too, which it otherwise ignores there.
"""

import json
import os
import runpy
import sys


def take_fsdp_on_a_cpu() -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def begin_with_fsdp(self, *args, fsdp_plugin=None, **settings):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin_with_fsdp


def forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as stream:
        plan = json.load(stream)
    if any(run.get("accelerate_on_cpu") for run in plan):
        take_fsdp_on_a_cpu()
    rank = int(os.environ["RANK"])
    for run in plan:
        if rank >= run["processes"]:
            continue
        os.environ |= {"WORLD_SIZE": str(run["processes"]), "LOCAL_WORLD_SIZE": str(run["processes"])}
        os.environ |= {"MASTER_PORT": str(run["port"]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        sys.argv[:] = [run["script"], *run["arguments"]]
        runpy.run_path(run["script"], run_name="__main__")
        if run.get("accelerate_on_cpu"):
            forget_accelerate()


if __name__ == "__main__":
    main()
