"""``python -m bench.study NAME`` makes a table of the paper, or one beside them; NAME ``--help`` has options.

main: the main table, and loss against steps and seconds; ablation: the ablation table and its curves; cosmos: the
comparison with COSMOS; lengths: every method tuned at every length; gpt-124m: GPT-2 124M's shape on a GPU, for as many
minutes as there are. The last two go on with the recorded rows.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench import command

NAMES = ("main", "ablation", "cosmos", "lengths", "gpt-124m")


def compare(name: str, argv: Sequence[str]) -> int:
    """Run what takes tyro and pandas."""
    from bench.study import comparisons, lengths

    commands: dict[str, tuple[type, Callable[[Any], str]]] = {
        **{name: (comparisons.Options, partial(comparisons.run, name)) for name in comparisons.COMPARISONS},
        "lengths": (lengths.Options, lengths.run),
    }
    kind, run = commands[name]
    options = command.options(kind, argv, f"bench.study {name}")
    command.make_folder(options.out)
    if text := run(options):
        print(f"\n{text}\nResults are in {options.out}", flush=True)
    return 0


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 1 if a run failed, 2 for wrong input, 130 after Ctrl-C."""
    parser = command.Parser(prog="python -m bench.study", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args(argv[:1]).name
    if name == "gpt-124m":  # which a GPU machine runs that may lack all but torch and numpy
        from bench.study import gpt124m

        return gpt124m.main(argv[1:])
    return compare(name, argv[1:])


if __name__ == "__main__":
    sys.exit(main())
