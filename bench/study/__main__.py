"""``python -m bench.study NAME`` makes a table of the paper, or one beside them; NAME ``--help`` has options.

main: the main table, and loss against steps and seconds; ablation: the ablation table and its curves; cosmos: the
comparison with COSMOS; lengths: every method tuned at every length of a run; size: a model three times as wide, on a
fixed grid. The last two go on with the recorded rows.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench import command
from bench.study import comparisons, lengths, size

COMMANDS: dict[str, tuple[type, Callable[[Any], str]]] = {
    **{name: (comparisons.Options, partial(comparisons.run, name)) for name in comparisons.COMPARISONS},
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
    if text := run(options):
        print(f"\n{text}\nResults are in {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
