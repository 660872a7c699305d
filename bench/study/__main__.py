"""``python -m bench.study NAME`` makes a table or figure of the paper, or one beside them; NAME ``--help`` has options.

main: the main table, its sweeps, and loss against steps and seconds; ablation: the ablation table and its curves;
cosmos: the comparison with COSMOS; spectra: of KL-Shampoo's L and R; phi: spectra of Phi_L under Pro-KLShampoo over
windows of 10 minibatches; lengths: every method tuned at every length of a run; size: a model three times as wide, on a
fixed grid. The last two go on with the recorded rows.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench import command
from bench.study import lengths, size
from bench.study.comparisons import COMPARISONS
from bench.study.options import Options
from bench.study.spectra import WATCHINGS
from bench.study.study import Study
from bench.study.units import Place
from bench.training.processes import join, leave


def _train(name: str, o: Options) -> str:
    """Make a comparison or spectra; return what there is to print, in the first of several processes."""
    scales, comparison, starts = o.scales, COMPARISONS.get(name), o.compared_starts
    if comparison:
        scales = comparison.possible(o.scales, starts, o.tune)
    processes, device = join(o.place)
    try:
        if processes.first and (left_out := [scale.name for scale in o.scales if scale not in scales]):
            print(f"Left out, as the paper has not all that {name} needs: {', '.join(left_out)}", flush=True)
        studies = [
            Study(
                Place(scale, o.data, o.checkpoint_seconds, o.runs_at_a_time, processes),
                o.out,
                o.seeds,
                o.tune or not scale.is_paper,
                device,
            )
            for scale in scales
        ]
        if comparison:
            return comparison.run(studies, starts, o.out)
        drawn = [WATCHINGS[name].run(study, starts[0], o.out) for study in studies]
        return "\n".join(map(str, drawn)) if processes.first else ""
    finally:
        leave()


COMMANDS: dict[str, tuple[type, Callable[[Any], str]]] = {
    **{name: (Options, partial(_train, name)) for name in (*COMPARISONS, *WATCHINGS)},
    "lengths": (lengths.Options, lengths.run),
    "size": (size.Options, size.run),
}


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    parser = command.Parser(prog="python -m bench.study", description=__doc__)
    parser.add_argument("name", choices=COMMANDS)
    name = parser.parse_args(argv[:1]).name
    kind, run = COMMANDS[name]
    options = command.options(kind, argv[1:], f"bench.study {name}")
    command.make_folder(options.out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if text := run(options):
            print(f"\n{text}\nResults are in {options.out}", flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
