"""``python -m bench.study NAME`` makes a table of the paper, or one beside them; NAME ``--help`` has options.

main: the main table, and loss against steps and seconds; ablation: the ablation table and its curves; cosmos: the
comparison with COSMOS; lengths: every method tuned at every length of a run; size: a model three times as wide, on a
fixed grid. The last two go on with the recorded rows.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench import command
from bench.study import comparisons, lengths, size
from bench.study.options import Options
from bench.study.study import Study
from bench.study.units import Place
from bench.training.processes import join, leave


def _train(name: str, o: Options) -> str:
    """Make a comparison; return what there is to print, in the first of several processes."""
    scales = comparisons.possible(name, o.scales)
    processes, device = join(o.device)
    try:
        if processes.first and (left_out := [scale.name for scale in o.scales if scale not in scales]):
            print(f"Left out, as the paper has not all that {name} needs: {', '.join(left_out)}", flush=True)
        places = [Place(scale, o.data, processes=processes) for scale in scales]
        return comparisons.run(name, [Study(place, o.out, o.seeds, device) for place in places])
    finally:
        leave()


COMMANDS: dict[str, tuple[type, Callable[[Any], str]]] = {
    **{name: (Options, partial(_train, name)) for name in comparisons.COMPARISONS},
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
