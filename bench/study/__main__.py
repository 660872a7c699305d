"""``python -m bench.study NAME`` makes a table or figure of the paper, or one beside them; ``--help`` lists them.

``lengths`` and ``size``, whose options are their own, go on with the recorded rows (:mod:`bench.study.policies`).
"""

import sys
from collections.abc import Sequence

import torch

from bench import command
from bench.study import alpha, cost, policies
from bench.study.comparisons import COMPARISONS
from bench.study.options import STILL, Options
from bench.study.pool import Interrupted, runner
from bench.study.spectra import WATCHINGS
from bench.study.study import Study
from bench.training.loop import deferred_interrupt
from bench.training.processes import join, leave


def _run(o: Options) -> str:
    """Do what is asked for; return what there is to print, in the first of several processes."""
    command.make_folder(o.out)
    if o.name in STILL:
        return {"alpha": alpha, "memory": cost}[o.name].run(o.scales, o.out)
    scales, comparison, starts = o.scales, COMPARISONS.get(o.name), o.compared_starts
    if comparison:
        scales = comparison.possible(o.scales, starts, o.tune)
    processes, device = join(o.place)
    if processes.first and (left_out := [scale.name for scale in o.scales if scale not in scales]):
        print(f"Left out, as the paper has not all that {o.name} needs: {', '.join(left_out)}", flush=True)
    with deferred_interrupt() as interrupt:
        studies = []
        for scale in scales:
            by = runner(scale, o.data, o.runs_at_a_time, interrupt, o.checkpoint_seconds, processes)
            search = o.tune or not scale.is_paper
            studies.append(Study(scale, by, o.out, o.seeds, search, device))
        if comparison:
            return comparison.run(studies, starts, o.out)
        drawn = [WATCHINGS[o.name].run(study, starts[0], o.out) for study in studies]
        return "\n".join(map(str, drawn)) if processes.first else ""


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    if argv[:1] and argv[0] in policies.POLICIES:
        return policies.main(argv[0], argv[1:])
    threads = torch.get_num_threads()
    try:
        options = command.options(Options, argv, "bench.study")
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
