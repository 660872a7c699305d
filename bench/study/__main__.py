"""``python -m bench.study NAME`` makes a table of the paper, or one beside them; NAME ``--help`` has options.

main: the main table, and loss against steps and seconds; ablation: the ablation table and its curves; cosmos: the
comparison with COSMOS; lengths: every method tuned at every length; gpt-124m: GPT-2 124M's shape on a GPU, for as many
minutes as there are. The last two go on with the recorded rows.
"""

import sys
from collections.abc import Sequence

from bench import command

NAMES = ("main", "ablation", "cosmos", "lengths", "gpt-124m")


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 1 if a run failed, 2 for wrong input, 130 after Ctrl-C."""
    parser = command.Parser(prog="python -m bench.study", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args(argv[:1]).name
    if name == "gpt-124m":  # which a GPU machine runs that may lack all but torch and numpy
        from bench.study import gpt124m

        return gpt124m.main(argv[1:])
    from bench.study import comparisons, lengths

    if name == "lengths":
        lengths.run(command.options(lengths.Options, argv[1:], "bench.study lengths"))
    else:
        comparisons.run(name, command.options(comparisons.Options, argv[1:], f"bench.study {name}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
