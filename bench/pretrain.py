"""``python -m bench.pretrain`` trains a small GPT on real text with several optimizers side by side.

All contenders start from the same weights, see the same batches, and take turns step by step, so that their
timings share whatever else the machine does. The run ends with a table and writes into ``--out``:
``table.md``, ``summary.csv``, ``curves.csv``, ``loss.png``, ``spectrum.png``, and ``seed-N.pt`` to resume.
"""

import math
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch
from tqdm import tqdm

import prokl
from bench.errors import INTERRUPTED, UsageError, command
from bench.training import checkpoint, corpus, plots, report
from bench.training.cli import make_folder, parse
from bench.training.contenders import short_label_of
from bench.training.loop import Interrupt, deferred_interrupt, train
from bench.training.run import Run
from bench.training.settings import Job
from bench.training.sources import ByteSource

BAR = "{desc} |{bar}| {n}/{total}, {remaining} left{postfix}"  # fits 80 columns


def _fingerprint(job: Job, seed: int, text: corpus.Corpus) -> dict[str, Any]:
    """What two halves of one run must share."""
    versions = {"torch": str(torch.__version__), "prokl": prokl.__version__}
    return job.settings.flat() | {"seed": seed, "corpus": text.sha256} | versions


def _prepare(job: Job, text: corpus.Corpus) -> dict[int, dict[str, Any]]:
    """Checks the results folder before anything is trained, and reads what ``--resume`` goes on from."""
    make_folder(job.out)
    found = {s: path for s in job.seeds if (path := checkpoint.path_for(job.out, s)).exists()}
    if job.resume:
        if not found:
            raise UsageError(f"--resume found no checkpoint in {job.out} for the seed; leave --resume out or fix --out")
        return {s: checkpoint.load(path, _fingerprint(job, s, text)) for s, path in found.items()}
    for seed, path in found.items():
        if job.overwrite:
            continue
        content = checkpoint.read(path)
        if not content["state"]["finished"]:
            raise UsageError(f"{path} is an unfinished run; add --resume to go on, or --overwrite to start again")
        if content["fingerprint"] != _fingerprint(job, seed, text):
            raise UsageError(f"{path} is a finished run with other settings; choose another --out, or add --overwrite")
    for path in found.values():
        path.unlink()
    return {}


def _progress(run: Run) -> str:
    """The latest training loss of each contender."""
    losses = {lane.key: lane.record.losses[-1] if lane in run.live else math.nan for lane in run.lanes}
    return "  ".join(f"{short_label_of(key)} {loss:.2f}" for key, loss in losses.items())


def _train(job: Job, run: Run, fingerprint: dict[str, Any], interrupt: Interrupt) -> None:
    """Trains until done or interrupted, showing how far it is."""
    steps, first, start = run.settings.steps, run.done, monotonic()
    with tqdm(
        desc=f"seed {run.seed}",
        total=steps,
        initial=first,
        disable=None,
        dynamic_ncols=True,
        bar_format=BAR,
    ) as bar:

        def show() -> None:
            bar.set_postfix_str(_progress(run), refresh=False)
            bar.update()
            # Without a terminal there is no bar to redraw; a line per evaluation says the same.
            if bar.disable and (run.done % run.settings.eval_every == 0 or run.finished):
                left = tqdm.format_interval((monotonic() - start) / (run.done - first) * (steps - run.done))
                print(f"seed {run.seed}, step {run.done}/{steps}, {left} left: {_progress(run)}", flush=True)

        path = checkpoint.path_for(job.out, run.seed)
        train(run, path, fingerprint, lambda: interrupt.requested, job.checkpoint_seconds, show)


def _status(job: Job, results: report.Results, source: str, done: int) -> str:
    s = job.settings
    seeds = f"seed{'s' * (len(results) > 1)} {', '.join(map(str, results))}"
    steps = f"{s.steps} steps" if done >= s.steps else f"{done} of {s.steps} steps"
    threads = f"{s.threads} CPU thread{'s' * (s.threads > 1)}"
    return f"{steps} of {s.batch} x {s.context} bytes, {seeds}, {threads}, {source}"


def _write(job: Job, results: report.Results, text: corpus.Corpus, done: dict[int, int]) -> None:
    """Prints the table and writes every file; a half-done seed counts only while no seed is whole."""
    furthest = max(done.values())
    counted = {seed: records for seed, records in results.items() if done[seed] == furthest}
    rows = report.summarise(counted)
    table = f"{_status(job, counted, text.source, furthest)}\n\n{report.markdown_table(rows, job.settings)}\n"
    print(f"\n{table}")
    (job.out / "table.md").write_text(table, encoding="utf-8")
    report.write_summary(job.out / "summary.csv", rows, job.settings, report.environment(text))
    report.write_curves(job.out / "curves.csv", results)
    plots.loss_curves(job.out / "loss.png", counted, job.settings)
    plots.spectra(job.out / "spectrum.png", next(iter(counted.values())), job.settings)
    if job.sweep:
        report.write_sweep(job.out / "sweep.csv", rows, job.settings)
        print(report.best_of_sweep(rows, job.settings))
    print(f"Results are in {job.out}", flush=True)


def run_job(job: Job) -> int:
    """Runs every seed, then writes the results; the same after Ctrl-C, with what there is."""
    text = corpus.load(job.data, job.settings.context)
    saved = _prepare(job, text)
    torch.set_num_threads(job.settings.threads)
    print(f"{text.source}: {len(text.train):,} bytes to train on, {len(text.validation):,} to validate", flush=True)
    results: report.Results = {}
    done: dict[int, int] = {}
    with deferred_interrupt() as interrupt:
        for seed in job.seeds:
            run = Run(job.settings, seed, ByteSource(text))
            if seed in saved:
                run.load_state_dict(saved[seed])
            try:
                _train(job, run, _fingerprint(job, seed, text), interrupt)
            except KeyboardInterrupt:  # a second Ctrl-C; the step under way is lost
                interrupt.requested = True
            results[seed] = run.records()
            done[seed] = job.settings.steps if run.finished else run.done
            if interrupt.requested:
                break
        _write(job, results, text, done)
    if not run.finished or len(results) < len(job.seeds):
        print("Interrupted; the same command with --resume goes on from the last checkpoint.", file=sys.stderr)
        return INTERRUPTED
    return 0


@command
def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code: 0, 2 for wrong input, 130 after Ctrl-C."""
    threads = torch.get_num_threads()
    try:
        return run_job(parse(argv))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "Interrupted; the same command with --resume goes on, if a checkpoint was written."
        ) from None
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
