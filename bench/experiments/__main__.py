"""``python -m bench.experiments NAME`` makes one table or figure of the paper; ``--help`` lists them."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from bench.errors import UsageError
from bench.experiments.cli import Options, parse
from bench.experiments.comparisons import COMPARISONS
from bench.experiments.pool import Interrupted, runner
from bench.experiments.study import Study
from bench.processes import join, leave
from bench.training import INTERRUPTED

NAMES = {
    "main": "the main table, its sweeps, and loss against steps and seconds",
    "ablation": "the ablation table and its curves",
    "cosmos": "the comparison with COSMOS",
}


def _run(o: Options) -> str:
    processes, device = join(o.device)
    with ExitStack() as stack:
        studies = [
            Study(
                scale,
                stack.enter_context(runner(scale, o.data, o.jobs, o.checkpoint_seconds, processes)),
                o.out,
                o.seeds,
                o.tune or not scale.is_paper,
                device,
            )
            for scale in o.scales
        ]
        return COMPARISONS[o.name].run(studies, o.starts, o.out)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    threads = torch.get_num_threads()
    try:
        options = parse(list(sys.argv[1:] if argv is None else argv), NAMES)
        torch.set_num_threads(1)
        text = _run(options)
        if text:
            print(f"\n{text}\nResults are in {options.out}", flush=True)
        return 0
    except UsageError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt):
        print("Interrupted; the same command goes on.", file=sys.stderr)
        return INTERRUPTED
    finally:
        leave()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
