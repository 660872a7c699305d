"""Each task of bench.tasks lets pass who stands it, and tells who does not."""

import os
import time

import pandas
import pytest
import torch
from torch import distributed
from torch.optim import SGD, AdamW, Optimizer

from bench import rows
from bench.command import INTERRUPTED
from bench.tasks import TASKS, guard, precision, problem, tables, training
from bench.tasks import __main__ as tasks
from bench.tasks.guard import Broken, guarded
from bench.tasks.peers import CONTENDERS, Contender, Peer, commit, split
from bench.tasks.problem import Failed


class Fake(Optimizer):
    """Momentum in ``state``, made at the beginning; ``move`` is for those who do something wrong."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "momentum": 0.9})
        for p in problem.held(self):
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, group)
        return loss

    def move(self, p, g, group):
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(group["momentum"]).add_(g)
        p.sub_(momentum, alpha=group["lr"])


class Skipping(Fake):
    def move(self, p, g, group):
        if g.isfinite().all():
            super().move(p, g, group)


class Whole(Fake):
    """Divides by the norm of the whole tensor: other experts and entries have a say."""

    def move(self, p, g, group):
        super().move(p, g / g.norm(), group)


class Forgetful(Fake):
    """Has a warm-up whose count no checkpoint and no copy has."""

    def move(self, p, g, group):
        self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        super().move(p, g * min(1.0, self.count / 1000), group)


class Wide(Fake):
    """Keeps float32 momentum, which load_state_dict takes to the weight's dtype."""

    def move(self, p, g, group):
        momentum = self.state[p].get("momentum").float()
        self.state[p]["momentum"] = momentum.mul_(0.9).add_(g.float())
        p.copy_(p.float() - group["lr"] * self.state[p]["momentum"])


class Silent(Fake):
    def step(self, closure=None):
        super().step(closure)


class Twice(Fake):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return super().step(closure)


class Deaf(Fake):
    """Steps what it was built with."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.known = problem.held(self)

    def move(self, p, g, group):
        if p in self.known:
            super().move(p, g, group)


class Eager(Fake):
    """Takes a gradient that is not there for zero."""

    def step(self, closure=None):
        for p in problem.held(self):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return super().step(closure)


class Rough(Fake):
    def move(self, p, g, group):
        super().move(p, g.float().to(p.dtype), group)


class Refusing(Fake):
    def move(self, p, g, group):
        if p.ndim < 2 or p.dtype == torch.bfloat16:
            raise ValueError("weights have to be matrices of float32; build a new optimizer")
        super().move(p, g, group)


class Traced(Fake):
    def move(self, p, g, group):
        super().move(p, g * (2 if torch.compiler.is_compiling() else 1), group)


class Apart(Fake):
    def move(self, p, g, group):
        super().move(p, g * (1 + distributed.get_rank()), group)


class Counting(Fake):
    """Divides by the number of the weights that it has."""

    def move(self, p, g, group):
        super().move(p, g / len(problem.held(self)), group)


class Listing(Fake):
    def move(self, p, g, group):
        super().move(p, g, group)
        self.state[p]["shapes"] = [p.shape[0]]


class Large(Fake):
    def move(self, p, g, group):
        super().move(p, g * 1e4, group)


STANDS = {
    "NaN in a matrix's gradient": Skipping,
    "NaN in an embedding's gradient": Skipping,
    "dtype change": Fake,
    "compile": Fake,  # as AdamW, but traced at once
    "DCP, late starter": Fake,
}
"""Who stands a task that AdamW does not."""
FAILS = [
    ("whole model in one optimizer", SGD, "loss fell by"),
    ("experts", Whole, "of the way from where"),
    ("convolutions", Large, "of the loss"),
    ("resume", Forgetful, "resumed run"),
    ("bf16 resume", Wide, "state comes back in bfloat16"),
    ("deepcopy", Forgetful, "the copy"),
    ("pickle", Forgetful, "the copy"),
    ("closure", Silent, "its loss is not returned"),
    ("closure", Twice, "called 2 times in 1 steps"),
    ("OneCycle defaults", Large, "loss fell by"),
    ("unnamed groups", Deaf, "taken, but not moved"),
    ("NaN in a matrix's gradient", AdamW, "up_proj.weight not finite after it"),
    ("NaN in an embedding's gradient", AdamW, "embedding.weight not finite after it"),
    ("missing gradients", Eager, "moved without a gradient"),
    ("float64", Rough, "out of proportion"),
    ("dtype change", AdamW, "RuntimeError"),
    ("flat vectors", Whole, "stepped as a matrix of one row"),
    ("compile", Traced, "from the plain one"),
    ("DDP", Apart, "replicas"),
    ("ZeRO", Counting, "from the whole one"),
    ("DCP", Forgetful, "resumed run"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(training, "STEPS", 12)
    torch.set_num_threads(1)
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("task", TASKS)
def test_who_stands_a_task_passes(task):
    kind = STANDS.get(task, AdamW)
    assert TASKS[task](Peer("fake", lambda params: kind(params, lr=3e-3)))


@pytest.mark.parametrize(("task", "kind", "says"), FAILS)
def test_who_does_not_stand_a_task_fails(task, kind, says):
    with pytest.raises(Failed, match=says):
        TASKS[task](Peer("fake", lambda params: kind(params, lr=0.01)))


@pytest.mark.parametrize(
    ("task", "kind", "error"),
    [("DCP, late starter", AdamW, "Missing key"), ("flattened DCP", Listing, "Flattening")],
)
def test_what_torch_raises_is_no_outcome_of_the_task(task, kind, error):
    with pytest.raises(Exception, match=error):
        TASKS[task](Peer("fake", lambda params: kind(params, lr=0.01)))


@pytest.mark.parametrize("task", ["dtype change", "flat vectors"])
def test_a_sentence_before_anything_moves_is_as_good(task):
    said = TASKS[task](Peer("fake", Refusing, lambda model: [p for p in model.parameters() if p.ndim > 1]))
    assert said == "refuses: ValueError: weights have to be matrices of float32; build a new optimizer"


def test_an_operation_that_fails_is_no_refusal():
    def raised(work):
        with pytest.raises(Exception) as error:  # noqa: B017
            work()
        return error.value

    def told():
        raise ValueError("this is a sentence")

    def bare():
        raise ValueError

    def failing():
        torch.zeros(2) + torch.zeros(3)

    assert [precision.refuses(raised(work)) for work in (told, bare, failing)] == [True, False, False]


def test_who_is_for_matrices_alone_is_told_by_what_it_is_given():
    peer = Peer("fake", AdamW, lambda model: [p for p in split(model)[0] if p.ndim == 2])
    for task, says in (
        ("whole model in one optimizer", "for matrices alone"),
        ("experts", "not for 3-D weights"),
        ("convolutions", "not for 4-D weights"),
        ("NaN in an embedding's gradient", "not for embeddings"),
    ):
        with pytest.raises(Failed, match=says):
            TASKS[task](peer)


def test_work_that_raises_dies_or_hangs_is_reported_and_leaves_nobody(tmp_path):
    def hang():
        guard.Job(lambda: (tmp_path / "pid").write_text(str(os.getpid())) and time.sleep(60)).result()

    with pytest.raises(Broken, match="KeyError: 'a'"):
        guarded(lambda: {}["a"])
    with pytest.raises(Broken, match="exit status 7"):
        guarded(lambda: os._exit(7))
    with pytest.raises(Broken, match=r"still running after 0\.5 s"):
        guarded(hang, 0.5)
    with pytest.raises(Broken, match="still running after 1 s of a core"):
        guarded(lambda: [None for _ in iter(int, 1)], 60, 1)
    with pytest.raises(OSError):  # it, too, has ended with its group
        for _ in range(50):
            os.kill(int((tmp_path / "pid").read_text()), 0)
            time.sleep(0.1)
    assert guarded(lambda: "well", 10) == "well"


def test_errors_have_no_folders_of_this_machine():
    assert guard.brief(OSError("cannot open /some/where/file.py:3\nmore")) == "OSError: cannot open file.py:3"


@pytest.fixture
def two(monkeypatch):
    """Two peers and two tasks that take no time."""

    def well(peer):
        return "as it should"

    def badly(peer):
        raise Failed("not at all") if peer.name == "one" else OSError("nothing")

    monkeypatch.setattr(tasks, "TASKS", {"resume": well, "DCP": badly})
    monkeypatch.setattr(tasks, "CONTENDERS", (
        Contender("torch.AdamW", "torch.optim", lambda package, params: None, distribution="torch"),
        Contender("dion.Muon", "json", lambda package, params: None, checkout="dion"),
        Contender("torch.Muon", "nonsense", lambda package, params: None, distribution="no-such-package"),
    ))  # fmt: skip


def test_rows_are_written_by_peer_and_task_and_who_is_not_here_is_left_out(two, tmp_path, capfd):
    out, folder = tmp_path / "tasks.csv", tmp_path / "checkout"
    folder.mkdir()
    assert tasks.main(["--tasks", "resume", "DCP", "--checkout", f"dion={folder}", "--out", str(out)]) == 0
    found = rows.read(out)
    assert [(r["peer"], r["task"], r["outcome"], r["detail"]) for r in found] == [
        (peer, task, outcome, detail)
        for peer in ("torch.AdamW", "dion.Muon")
        for task, outcome, detail in (("resume", "yes", "as it should"), ("DCP", "error", "OSError: nothing"))
    ]
    assert {r["device"] for r in found} == {"cpu"} and [r["version"] for r in found][2:] == ["checkout"] * 2
    assert "torch.Muon is left out: not installed: pip install no-such-package" in capfd.readouterr().out
    assert tasks.main(["--tasks", "resume", "--out", str(out)]) == 0
    assert "dion.Muon is left out: no checkout: --checkout dion=DIR" in capfd.readouterr().out
    assert len(rows.read(out)) == 4


def test_a_checkout_has_the_commit_as_its_version(tmp_path):
    assert commit(tmp_path) == "checkout"
    assert commit(rows.ROOT / "bench") == "checkout"  # a folder of a repository is none


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", "nonsense"], "nonsense"),
        (["--peers", "torch.Muon", "torch.Muon"], "--peers names one twice"),
        (["--peers"], "--peers has no value"),
        (["--checkout", "nonsense=."], "must be NAME=DIR with a NAME of muon, dion"),
        (["--checkout", "dion=/no/such"], "there is no folder /no/such"),
        (["--out", "."], "--out .: must be a file"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, says, capsys):
    assert tasks.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_ctrl_c_ends_with_its_status(two, monkeypatch):
    def interrupt(work):
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "guarded", interrupt)
    assert tasks.main([]) == INTERRUPTED


def test_where_this_package_is_worse_the_reason_stands_there():
    assert set(tables.worse(rows.frame(rows.RESULTS / "tasks.csv"))) == set(tables.REASONS)


def test_the_tables_have_every_peer_and_what_happened(monkeypatch):
    lines = [
        ("prokl.A", "resume", "no", "a < b"),
        ("torch.B", "resume", "yes", "fine"),
        ("c.C", "resume", "no", "a < b"),
        ("c.C", "DDP", "error", "OSError: <d>"),
    ]
    found = pandas.DataFrame(lines, columns=["peer", "task", "outcome", "detail"]).assign(version="1", torch="2")
    monkeypatch.setattr(tables, "REASONS", {"resume": "it forgets."})
    assert tables.worse(found) == ["resume"]
    assert [line.split() for line in tables.outcomes(found).splitlines()[2:]] == [
        "| resume | no | yes | no |".split(),
        "| DDP | - | - | error |".split(),
    ]
    said = tables.details(found).splitlines()
    assert said[0] == "Versions: prokl.A 1, torch.B 1, c.C 1; torch 2."
    assert "- prokl.A, c.C: a &lt; b" in said and "- c.C: `OSError: <d>`" in said
    assert "- Why prokl is worse: it forgets." in said


def test_every_contender_is_named_once():
    names = [contender.name for contender in CONTENDERS]
    assert len(names) == len(set(names))
