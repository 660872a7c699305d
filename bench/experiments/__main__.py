"""``python -m bench.experiments NAME`` makes one table or figure of the paper; ``--help`` lists them."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from bench.errors import command
from bench.experiments import alpha, cost, sensitivity
from bench.experiments.cli import Offer, Options, parse
from bench.experiments.comparisons import COMPARISONS
from bench.experiments.pool import Interrupted, runner
from bench.experiments.spectra import WATCHINGS
from bench.experiments.study import Study
from bench.training.cli import make_folder
from bench.training.loop import deferred_interrupt
from bench.training.processes import join, leave

NAMES = {
    "main": "the main table, its sweeps, and loss against steps and seconds",
    "ablation": "the ablation table and its curves",
    "cosmos": "the comparison with COSMOS",
    "sensitivity": "what orderings depend on: start, length, rate of the ablations, rank of Smok-Hop",
    "spectra": "spectra of KL-Shampoo's L and R",
    "phi": "spectra of Phi_L under Pro-KLShampoo over windows of 10 minibatches",
    "alpha": "the brackets on alpha_kl, without training",
    "memory": "state and operations of a step on the paper's models, without training",
}
STILL = {"alpha": alpha, "memory": cost}  # those that train nothing
OFFER = Offer(NAMES, {name: module.HAVING for name, module in STILL.items()}, (sensitivity.NAME,), WATCHINGS)


def _run(o: Options) -> str:
    """Does what is asked for; what there is to print, in the first of several processes."""
    make_folder(o.out)
    if o.name in STILL:
        return STILL[o.name].run(o.scales, o.out)
    scales, comparison = o.scales, COMPARISONS.get(o.name)
    if comparison:
        scales = comparison.possible(o.scales, o.starts, o.tune)
    elif o.name == sensitivity.NAME:
        scales = sensitivity.possible(o.scales, o.tune)
    processes, device = join(o.device)
    if processes.first and (left_out := [scale.name for scale in o.scales if scale not in scales]):
        print(f"Left out, as the paper has not all that {o.name} needs: {', '.join(left_out)}", flush=True)
    with deferred_interrupt() as interrupt, ExitStack() as stack:
        studies = []
        for scale in scales:
            runner_ = stack.enter_context(runner(scale, o.data, o.jobs, interrupt, o.checkpoint_seconds, processes))
            studies.append(Study(scale, runner_, o.out, o.seeds, o.tune or not scale.is_paper, device))
        if comparison:
            return comparison.run(studies, o.starts, o.out)
        if o.name == sensitivity.NAME:
            return sensitivity.run(studies, o.vary, o.out)
        drawn = [WATCHINGS[o.name].run(study, o.starts[0], o.out) for study in studies]
        return "\n".join(map(str, drawn)) if processes.first else ""


@command
def main(argv: Sequence[str]) -> int:
    """The command; its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    threads = torch.get_num_threads()
    try:
        options = parse(argv, OFFER)
        torch.set_num_threads(1)
        text = _run(options)
        if text:
            print(f"\n{text}\nResults are in {options.out}", flush=True)
        return 0
    except (Interrupted, KeyboardInterrupt):
        raise KeyboardInterrupt("Interrupted; the same command goes on.") from None
    finally:
        leave()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
