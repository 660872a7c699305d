"""GPT-2 124M's shape trained on a GPU, minute by minute: which runs are made, in which order, and the command.

The model is the paper's GPT-2 124M as ``bench.models`` has it, with the vocabulary of the data. A run is 800 steps of
32 x 1,024 tokens; rates rise over a twentieth of them, then fall linearly to zero. Rates of a method are STEP apart.
Its search tries the first one and the next higher one, and goes on beyond the best until that lies between two others.
Pro-KLShampoo has queries and keys by heads, as param_groups makes its groups. Muon has whole weights, as torch's; its
step on a GPU is in batches, as the host would bound torch's. This order was fixed before the first run. Which rates
follow depends on losses alone, but for six runs that asked why Muon led: Pro-KLShampoo with alpha_kl 0.002 at 0.03 and
with 0.02, with rank 32 at 0.0133, with whole weights, and unchanged on a second seed, and Muon by heads on that.

1. AdamW at its first two rates. The better is that of embedding and head under every other method.
2. The searches of Pro-KLShampoo and of Muon with momentum 0.9, in turns; then the former with whole weights, the latter
   by heads.
3. Changes of Pro-KLShampoo, one at a time, which stood behind 5 until Muon led in eleven runs. The first have more
   frequent refreshes, then fewer iterations of Newton-Schulz. The next have rank 2 at Muon's best rate and two steps
   below: what is left beside Muon is the whitening of the short side, and little more.
4. KL-Shampoo, Muon and the paper's form at their first rates, further searches, SOAP at its first rate.
5. At their best rates Pro-KLShampoo, Muon with 0.9 and KL-Shampoo on two more seeds, with a weight decay, and what is
   left of the other searches.
6. The three for 3,200 steps, at their best rates and the next lower ones. Then the three on GPT-2 350M's shape.

One that would not end in the minutes that are left is put off, and the next that would takes its place. A run is
always made from its start, as it lasts about a minute on a GPU. One that is interrupted leaves no row.
"""

import argparse
import math
import statistics
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench import clock, command, rows
from bench.command import Parser, UsageError
from bench.models import CONFIGS, gpt2
from bench.optimizers import PRO, Hyper
from bench.study import runs
from bench.study.lengths import STEP, climbed, rounded
from bench.training.compiled import Compiled
from bench.training.run import Record, Scale
from bench.training.sources import Source, open_source
from bench.workers import GOES_ON

SCALES = {
    "full": (
        Scale("gpt2-124m", CONFIGS["gpt2-124m"], (32, 128, 256), 800, 4, 256, batch=32, autocast=True),
        Scale("gpt2-350m", CONFIGS["gpt2-350m"], (32, 128, 256), 800, 4, 256, batch=32, autocast=True),
    ),
    "rehearsal": (
        Scale("rehearsal", gpt2(2, 64, 2, context=64), (2, 10, 21), 20, 4, 8, batch=4),
        Scale("rehearsal, larger", gpt2(3, 96, 2, context=64), (4, 16, 32), 20, 4, 8, batch=4),
    ),
}
"""The model and the larger one: what is trained, and one that tries the command in seconds on a CPU."""
LONGER = 4  # times the steps, 3,200 of the full scale
DECAYS = (0.1, 0.03)
FURTHEST = 6  # powers of STEP that a search goes from its first rate, a factor of 11
ROOM = 1.1  # what a run takes, per time of its steps on the device: a tenth more, for validation and restart
SIZES = {"cuda": 8192, "cpu": 512}  # of the products that measure a device's rate
OWN = ("model", "steps", "case", "lr", "adamw_lr", "seed")  # the columns that tell the trials of one source apart
KEY = ("data_sha256", "vocabulary", *OWN)
FILE = "gpt-124m.csv"
CURVES = "gpt-124m-curves.csv"

ADAMW, OURS, MUON_9, KL = "AdamW", "Pro-KLShampoo", "Muon, momentum 0.9", "KL-Shampoo"
MUON, PAPER, SOAP = "Muon", "Pro-KLShampoo, paper's form", "SOAP"
FORMS = {
    ADAMW: Hyper("adamw", 4e-3),
    OURS: Hyper(PRO, 3e-2),
    MUON_9: Hyper("muon", 3e-2, momentum=0.9),
    KL: Hyper("kl-shampoo", 1e-2),
    MUON: Hyper("muon", 3e-2),
    PAPER: Hyper(PRO, 3e-2, preset="paper", bounded=False),
    SOAP: Hyper("soap", 3e-3),
}
"""Everything that is compared, by label, at its first rate."""
THREE = (OURS, MUON_9, KL)
BY_HEADS, WHOLE = "q, k by heads", "whole weights"


@dataclass(frozen=True)
class Trial:
    """One run."""

    scale: Scale
    case: str  # as rows name it
    hyper: Hyper
    base: str = ""  # the case that this one is a change of
    seed: int = 0
    state_dtype: str | None = None  # of this package's optimizers; None is the weights' own

    @property
    def key(self) -> tuple[str, ...]:
        """Return what its row has in the columns OWN."""
        own = (self.scale.name, self.scale.steps, self.case, self.hyper.lr, self.hyper.adamw_lr, self.seed)
        return tuple(map(rows.text, own))

    def changed(self, change: str, state_dtype: str | None = None, **settings: object) -> "Trial":
        """Return it with other settings, under a name that says so."""
        hyper = replace(self.hyper, **settings)  # type: ignore[arg-type]
        return replace(self, case=f"{self.case}, {change}", base=self.case, hyper=hyper, state_dtype=state_dtype)

    def __str__(self) -> str:
        beside = "" if self.hyper.adamw_lr is None else f", AdamW's {self.hyper.adamw_lr:.4g}"
        own = f"{self.case}: lr {self.hyper.lr:.4g}{beside}, seed {self.seed}"
        return f"{own}, {self.scale.steps} steps of {self.scale.name}"


Losses = Mapping[tuple[str, ...], float]
"""Final losses by key; infinite for a run that diverged."""


def searched(first: Trial, known: Losses) -> tuple[list[Trial], Trial | None]:
    """Return the runs of a form at its rates, in their order, as far as known losses say them; the best at the end."""

    def at(power: int) -> Trial:
        return replace(first, hyper=replace(first.hyper, lr=rounded(first.hyper.lr * STEP**power)))

    return climbed(at, (0, 1), range(-FURTHEST, FURTHEST + 1), lambda trial: known.get(trial.key))


def trials(known: Losses, scales: tuple[Scale, Scale]) -> Iterator[Trial]:
    """Yield what is trained, in its order, as far as known losses decide it."""
    scale, larger = scales
    adamw, _ = searched(Trial(scale, ADAMW, FORMS[ADAMW]), known)
    yield from adamw[:2]
    if any(trial.key not in known for trial in adamw[:2]):
        return
    rate = min(adamw[:2], key=lambda trial: known[trial.key]).hyper.lr
    its: dict[str, list[Trial]] = {}
    best: dict[str, Trial] = {}
    for form, hyper in FORMS.items():
        if form != ADAMW:
            pieces = scale.config.heads if form == OURS else 1
            first = Trial(scale, form, replace(hyper, adamw_lr=rate, qk_pieces=pieces))
            its[form], found = searched(first, known)
            best |= {} if found is None else {form: found}

    for pair in zip_longest(its[OURS], its[MUON_9]):
        yield from filter(None, pair)
    for form, change, pieces in ((OURS, WHOLE, 1), (MUON_9, BY_HEADS, scale.config.heads)):
        if form in best:
            yield best[form].changed(change, qk_pieces=pieces)
    if OURS in best and MUON_9 in best:
        yield from changes(best[OURS], best[MUON_9].changed(BY_HEADS, qk_pieces=scale.config.heads))
    yield from (its[form][0] for form in (KL, MUON, PAPER))
    yield from its[KL][1:]
    yield from adamw[2:]
    yield its[SOAP][0]

    if not best.keys() >= {*THREE}:
        return
    three = [best[form] for form in THREE]
    yield from (replace(trial, seed=seed) for seed in (1, 2) for trial in three)
    yield from (trial.changed(f"weight decay {decay}", weight_decay=decay) for decay in DECAYS for trial in three)
    for form in (MUON, PAPER, SOAP):
        yield from its[form][1:]
    for lower in (1, STEP):
        for trial in three:
            hyper = replace(trial.hyper, lr=rounded(trial.hyper.lr / lower))
            yield replace(trial, scale=replace(scale, steps=LONGER * scale.steps), hyper=hyper)
    for trial in three:
        pieces = larger.config.heads if trial.case == OURS else 1
        yield replace(trial, scale=larger, hyper=replace(trial.hyper, qk_pieces=pieces))


def changes(of: Trial, muon: Trial) -> Iterator[Trial]:
    """Yield the trials of Pro-KLShampoo with a setting changed, or two that belong together, and one of Muon's."""
    (smallest, _, largest), muon_lr = of.scale.ranks, muon.hyper.lr
    yield of.changed("early refreshes")  # the default since 0.7; rows before it have the first one in step 10
    # On tokens queries and keys want more of the subspace, and higher rates, which both have: docs/findings.md.
    yield of.changed("query and key with eight times alpha_kl", qk_alpha=8.0)
    yield of.changed("query and key at Muon's rate", qk_rate=muon_lr / of.hyper.lr)
    yield muon.changed("query and key at twice the rate", qk_rate=2.0)
    yield of.changed("a refresh every 3", precondition_frequency=3)
    for steps in (4, 3):  # of a whitened matrix they make as much as five of Muon's momentum: docs/findings.md
        yield of.changed(f"ns_steps {steps}", ns_steps=steps)
    # The subspace's part has the size of any other of the m directions with 1 / sqrt(m).
    for lr in (muon_lr, rounded(muon_lr / STEP**2)):
        yield of.changed("rank 2, alpha_kl 0.036", rank=2, alpha_kl=0.036, lr=lr)
    yield of.changed("beta2 0.98", beta2=0.98)
    yield of.changed("no bound", bounded=False)  # it acts on 1 % of steps, perhaps just where losses fall fast
    yield of.changed("momentum and beta2 0.95", momentum=0.95, beta2=0.95)
    yield of.changed(f"rank {smallest}", rank=smallest)
    yield of.changed("bfloat16 state", state_dtype="bfloat16")
    yield of.changed(f"rank {largest}", rank=largest)


def planned(known: Losses, scales: tuple[Scale, Scale]) -> list[Trial]:
    """Return what would be trained if no further run ended below those before it: the shortest of all searches."""
    losses, order = dict(known), []
    while missing := next((trial for trial in trials(losses, scales) if trial.key not in losses), None):
        order.append(missing)
        losses[missing.key] = 1e6 + len(order)
    return order


def of_source(source: Source) -> rows.Row:
    """Return what tells the rows of this data with this vocabulary from others."""
    return {"data_sha256": source.sha256, "vocabulary": source.vocabulary}


def losses_of(found: Sequence[rows.Row]) -> dict[tuple[str, ...], float]:
    """Return the losses of rows by the keys of trials."""
    return {tuple(row.get(name, "") for name in OWN): float(row.get("validation_loss") or math.inf) for row in found}


class Runner:
    """The runs of one command: from the rows that are there, for as many minutes as it has."""

    def __init__(self, o: argparse.Namespace) -> None:
        """Open the data, which counts among its minutes; raise what ``opened`` does."""
        self.o, self.begun = o, perf_counter()
        self.source, self.device = opened(o), torch.device(o.device)
        self.path, self.curves = o.out / FILE, o.out / CURVES
        self.here = rows.environment(self.device)
        self.model: Compiled | None = None
        self.rate = 0.0  # of the device's products, FLOP/s
        self.left_out: set[tuple[str, ...]] = set()  # keys of runs that this command does not try again
        self.failed = self.made = 0
        self.seconds, self.ended = 0.0, self.begun  # of training; when the last run ended

    def found(self) -> list[rows.Row]:
        """Return the rows of this data with this vocabulary."""
        return rows.having(rows.read(self.path), of_source(self.source))

    def left(self) -> float:
        """Return the seconds that are left."""
        return 60 * self.o.minutes - (perf_counter() - self.begun)

    def work(self) -> None:
        """Make runs until none is left, or none would end in time."""
        while True:
            known = losses_of(self.found())
            every = dict.fromkeys(trials(known, self.o.scales))
            ready = [trial for trial in every if trial.key not in {*known, *self.left_out}]
            if not ready:
                return
            model = self.prepared(ready[0].scale)
            its = (trial for trial in ready if trial.scale.name == model.scale.name)
            trial = next((trial for trial in its if self.expected(trial) <= self.left()), None)
            if trial is None:
                needed = self.expected(ready[0])
                print(f"Next is {ready[0]}: about {needed:.0f} s, and {max(0.0, self.left()):.0f} s are left.")
                return
            try:
                self.train(model, trial)
            except UsageError as error:  # a package that is not there
                self.left_out.add(trial.key)
                print(f"Left out: {trial}: {error}", flush=True)
            except Exception:  # of one optimizer: the others are to be trained all the same
                self.left_out.add(trial.key)
                self.failed += 1
                traceback.print_exc()
                print(f"FAILED: {trial}", flush=True)

    def prepared(self, scale: Scale) -> Compiled:
        """Return the compiled model of a scale, in the place of that of another one."""
        if self.model is None or self.model.scale.name != scale.name:
            self.model = None
            before = perf_counter()
            dtype = torch.bfloat16 if scale.autocast else torch.float32
            self.rate = clock.product_rate(self.device, dtype, SIZES[self.device.type])
            self.model = Compiled(scale, self.source, self.device, self.o.eager)
            print(
                f"{scale.name}: {self.model.parameters:,} parameters, forward and backward take "
                f"{1e3 * self.model.pass_seconds:.1f} ms, after {perf_counter() - before:.0f} s of preparing; products "
                f"run at {self.rate / 1e12:.3g} TFLOP/s",
                flush=True,
            )
        return self.model

    def expected(self, trial: Trial) -> float:
        """Return the seconds that a run should take: as the last one of its optimizer, or of any, did here."""
        assert self.model is not None
        here = {"model": trial.scale.name, "device": self.here["device"], "cpu": self.here["cpu"]}
        timed = [row for row in rows.having(self.found(), here) if row.get("tokens_per_second")]
        own = [row for row in timed if row["optimizer"] == trial.hyper.method] or timed
        tokens = trial.scale.batch * trial.scale.config.context
        pace = tokens / float(own[-1]["tokens_per_second"]) if own else self.model.pass_seconds
        return ROOM * pace * trial.scale.steps

    def train(self, model: Compiled, trial: Trial) -> None:
        """Make a run and write its rows; give it up at the first validation if it proves too slow to end in time."""
        steps = trial.scale.steps
        for record in model.run(trial.hyper, trial.seed, steps, trial.state_dtype):
            done = len(record.losses)
            # The first steps begin the state, compile and record graphs.
            each = [sum(both) for both in zip(record.model_seconds, record.optimizer_seconds, strict=True)]
            remaining = statistics.mean(each[done // 2 :]) * (steps - done)
            if done <= model.marks(steps)[0] and record.diverged_at is None and remaining > self.left():
                self.left_out.add(trial.key)
                print(f"Given up, it would take {remaining:.0f} s more: {trial}", flush=True)
                return
        now = perf_counter()
        row = self.row(model, trial, record) | {"wall_seconds": now - self.ended}
        self.seconds, self.made, self.ended = self.seconds + row["seconds"], self.made + 1, now
        runs.keep(self.path, self.curves, row, runs.curve(record), KEY)
        print(described(trial, row, record), flush=True)

    def row(self, model: Compiled, trial: Trial, record: Record) -> rows.Row:
        """Return the row of a run."""
        h, steps = trial.hyper, len(record.losses)
        own = dict(zip(OWN, trial.key, strict=True)) | {"base": trial.base}
        own |= {"optimizer": h.method, "rank": h.rank, "preset": h.preset, "momentum": h.momentum, "beta2": h.beta2}
        own |= {name: getattr(h, name) for name in runs.SETTINGS}
        own |= runs.of_scale(model.scale, self.source.vocabulary, self.device.type) | {"steps": trial.scale.steps}
        own |= {"eval_windows": len(model.validation) * model.size, "compiled": not self.o.eager}
        own |= {"parameters": model.parameters, "state_dtype": trial.state_dtype, "clipped": record.clipped}
        own |= runs.figures(record) | {"seconds": record.seconds(steps)}
        first = model.marks(trial.scale.steps)[0]
        # Those before begin the state, compile and record graphs.
        later = slice(first if steps > first else 0, None)
        times = [1e3 * seconds for seconds in record.optimizer_seconds[later]]
        own |= {"optimizer_ms": statistics.mean(times), "optimizer_median_ms": statistics.median(times)}
        # A host that is far ahead waits in a step until the device takes more launches; after a validation it is not.
        own |= {"optimizer_longest_ms": max(times), "host_ms": 1e3 * min(record.host_seconds[later])}
        if steps > first:
            tokens = (steps - first) * trial.scale.batch * trial.scale.config.context
            own["tokens_per_second"] = tokens / (record.seconds(steps) - record.seconds(first))
        own["matmul_tflops"] = self.rate / 1e12
        if record.peak_bytes is not None:
            own["peak_gib"] = record.peak_bytes / 2**30
        return own | self.source.row | self.here


def of_floor(row: Mapping[str, Any]) -> float:
    """Return 6 x parameters x tokens a second over the rate of the device's products."""
    return 6 * row["parameters"] * row["tokens_per_second"] / (1e12 * row["matmul_tflops"])


def described(trial: Trial, row: rows.Row, record: Record) -> str:
    """Return what a run gave, in a line."""
    if record.diverged_at is not None:
        return f"{trial}: diverged at step {record.diverged_at}"
    losses = " ".join(f"{loss:.4f}" for _, loss in record.validation)
    line = f"{trial}: {losses}; {row['wall_seconds']:.1f} s"
    if "tokens_per_second" in row:
        line += f", {row['tokens_per_second']:,.0f} tokens/s, {of_floor(row):.1%} of the products' rate"
    times = [row[f"optimizer_{which}ms"] for which in ("", "median_", "longest_")]
    line += "; optimizer {:.2f} ms (median {:.2f}, longest {:.2f})".format(*times)
    return line + f", host {row['host_ms']:.2f} ms"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raise UsageError for a wrong argument."""
    parser = Parser(prog="python -m bench.study gpt-124m", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="token shards, .bin or .bin.xz: a file, or a folder of them")
    parser.add_argument("--out", type=Path, help="folder of rows (default: bench/results)")
    parser.add_argument("--minutes", type=float, default=7.0, help="start no run that would end later (default: 7)")
    parser.add_argument("--vocabulary", type=int, help="tokens that the model knows (default: what the shards have)")
    parser.add_argument("--micro-batch", type=int, help="sequences in one forward pass (default: all of a step)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, for a rehearsal cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model for seconds, into runs/rehearsal")
    parser.add_argument("--plan", action="store_true", help="say what would be trained, in which order; train nothing")
    o = parser.parse_args(argv)
    command.positive(minutes=o.minutes)
    command.at_least(1, vocabulary=o.vocabulary, micro_batch=o.micro_batch)
    o.device = o.device or ("cpu" if o.rehearse else "cuda")
    o.out = o.out or (Path("runs/rehearsal") if o.rehearse else rows.RESULTS)
    scales = SCALES["rehearsal" if o.rehearse else "full"]
    if o.micro_batch is not None and scales[0].batch % o.micro_batch:
        raise UsageError(f"--micro-batch {o.micro_batch}: must divide the {scales[0].batch} sequences of a step")
    o.scales = tuple(replace(scale, micro_batch=o.micro_batch, autocast=o.device == "cuda") for scale in scales)
    if o.plan:
        return o
    if o.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; --rehearse tries the command on a CPU")
    if o.data is None and not o.rehearse:
        raise UsageError("there is nothing to train on; give token shards with --data (docs/gpu.md says which)")
    return o


def opened(o: argparse.Namespace) -> Source:
    """Return the data, with the vocabulary that was asked for or the next multiple of 128 above the largest token."""
    source = open_source(o.data, o.scales[0].config.context, o.vocabulary or 2**16)
    if not source.epochs:
        if o.vocabulary:
            raise UsageError(f"--vocabulary {o.vocabulary}: text has bytes, 256 of them; leave it out")
        if not o.rehearse:
            raise UsageError(f"--data {o.data} is no token shards; give .bin or .bin.xz files")
        return source
    largest = max(int(part.max()) for part in (*source.train, *source.validation) if len(part))
    return replace(source, vocabulary=o.vocabulary or 128 * (largest // 128 + 1))


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, or 1 if a run failed."""
    o = parse(argv)
    if o.plan:
        names = {scale.name for scale in o.scales}
        found = [row for row in rows.read(o.out / FILE) if row["model"] in names]
        found = found if o.data is None else rows.having(found, of_source(opened(o)))  # else rows of all data
        for row in found:
            print(f"{row['case']}: lr {row['lr']}, seed {row['seed']}, {row['steps']} steps: trained")
        for i, trial in enumerate(planned(losses_of(found), o.scales), 1):
            print(f"{i}. {trial}")
        print("A search goes on beyond these rates while its last one is the best (bench/study/gpt124m.py).")
        return 0
    command.make_folder(o.out)
    threads = torch.get_num_threads()
    if o.device == "cpu":
        torch.set_num_threads(1)  # a tiny model is no work for two, and their sums would have another order
    runner = Runner(o)
    source = runner.source
    tokens = sum(map(len, source.train))
    print(f"{source.name}: {tokens:,} tokens, vocabulary {source.vocabulary}, {source.sha256[:16]}", flush=True)
    try:
        runner.work()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(GOES_ON) from None
    finally:
        torch.set_num_threads(threads)
        total = perf_counter() - runner.begun
        idle = f"{1 - runner.seconds / total:.0%} of it was not training"
        print(f"{runner.made} runs in {total:.0f} s; {idle}. Rows are in {runner.path}", flush=True)
    return 1 if runner.failed else 0
