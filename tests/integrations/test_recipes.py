"""The recipes of docs/integrations.md, run as they stand: weights are trained by prokl, resumed runs are exact."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import prokl
from tests.commands import ROOT
from tests.integrations.models import (
    Labelled,
    LanguageModel,
    assert_same_weights,
    assert_schedule_scales_every_group_alike,
    assert_trained_by_prokl,
    llama,
    loader,
    tokens,
)

DOCUMENT = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")


def recipes(heading):
    """Return the Python blocks of a section, each as a function of its scope that returns the scope."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)

    def run(code, **scope):
        exec(compile(code, heading, "exec"), scope)
        return scope

    return [partial(run, code) for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]


def test_there_are_no_blocks_beside_those_that_are_run_below():
    assert DOCUMENT.count("```") == 2 * (8 + 3)  # recipes, and errors in test_refused.py


@pytest.mark.parametrize(("way", "factor"), [(0, 0.0), (1, 1.0)], ids=["class", "optimizer and scheduler"])
def test_trainer_trains_and_resumes_exactly(way, factor):
    pytest.importorskip("transformers")
    recipe = recipes("Transformers: Trainer")[way]
    whole = recipe(model=llama(seed=0), dataset=Labelled(), resume=None)["trainer"]
    assert_trained_by_prokl(whole.optimizer)
    assert_schedule_scales_every_group_alike(whole.optimizer, factor)
    shutil.rmtree("runs/trainer/checkpoint-8")  # as if it had been interrupted after step 4
    resumed = recipe(model=llama(seed=1), dataset=Labelled(), resume=True)["trainer"]
    assert_same_weights(whole.model, resumed.model)
    assert whole.optimizer.optimizer.clipped()  # where the text says that it is


def test_trainer_logs_the_health_of_its_optimizer():
    transformers = pytest.importorskip("transformers")
    text = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    (callback,) = re.findall(r"```python\n(class Health.*?)```", text, re.DOTALL)
    arguments = transformers.TrainingArguments("runs/trainer", max_steps=3, save_strategy="no", report_to="none")
    by_class = (prokl.ProKLShampoo, {"params": prokl.param_groups(model := llama(seed=0), lr=0.02, adamw_lr=3e-3)})
    trainer = transformers.Trainer(model, arguments, train_dataset=Labelled(), optimizer_cls_and_kwargs=by_class)
    exec(
        callback,
        {"trainer": trainer, "diagnostics": prokl.diagnostics, "TrainerCallback": transformers.TrainerCallback},
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "prokl/clipped" in entry]
    assert [entry["prokl/without_gradient"] for entry in logged] == [0, 0, 0]
    assert "prokl/whitened_size_median" in logged[2] and "prokl/whitened_size_median" not in logged[0]


def test_trainer_makes_the_optimizer_of_the_model_that_it_makes():
    pytest.importorskip("transformers")
    recipe = recipes("Transformers: Trainer")[2]
    trainer = recipe(model_init=lambda: llama(seed=0), dataset=Labelled())["trainer"]
    assert_trained_by_prokl(trainer.optimizer)
    assert {p for group in trainer.optimizer.param_groups for p in group["params"]} == set(trainer.model.parameters())


def test_accelerate_trains_and_resumes_exactly():
    pytest.importorskip("accelerate")
    (recipe,) = recipes("Accelerate")
    scope = {"loader": loader(shuffle=True), "first_epoch": 0}
    whole = recipe(model=LanguageModel(seed=0, dropout=0.1), **scope)
    assert_trained_by_prokl(whole["optimizer"])
    assert_schedule_scales_every_group_alike(whole["optimizer"], 0.0)  # 16 steps of two batches
    assert prokl.diagnostics.scalars(whole["optimizer"])
    assert not prokl.diagnostics.health(whole["optimizer"]).numbers["prokl/skipped"]
    assert whole["bounded"] and whole["bounded"].keys() == whole["optimizer"].optimizer.skipped().keys()
    scope = {"loader": loader(shuffle=True), "first_epoch": 2}
    resumed = recipe(model=LanguageModel(seed=1, dropout=0.1), **scope)
    assert_same_weights(whole["model"], resumed["model"])


def test_lightning_trains_and_resumes_exactly():
    pytest.importorskip("lightning")
    (recipe,) = recipes("Lightning")
    whole = recipe(model=LanguageModel(seed=0), loader=loader(), checkpoint=None)
    (optimizer,) = whole["trainer"].optimizers
    assert_trained_by_prokl(optimizer)
    assert_schedule_scales_every_group_alike(optimizer, 0.0)
    assert whole["trainer"].global_step == 16
    interrupted = Interrupted(after=64)  # two epochs
    with pytest.raises(RuntimeError, match="interrupted"):
        recipe(model=LanguageModel(seed=0), loader=loader(interrupted), checkpoint=None)
    (checkpoint,) = Path("runs/lightning").rglob("version_1/**/*.ckpt")
    resumed = recipe(model=LanguageModel(seed=1), loader=loader(), checkpoint=checkpoint)
    assert_same_weights(whole["model"], resumed["model"])


class Interrupted:
    """Rows of tokens that run out in the midst of training."""

    def __init__(self, after):
        self.rows, self.left = tokens(), after

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("interrupted")
        return self.rows[index]


def test_plain_pytorch_trains_and_resumes_exactly(monkeypatch):
    # What Inductor makes of the model takes it a minute, and the optimizer never sees it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    (recipe,) = recipes("Plain PyTorch, as torchtitan trains")
    batches = tokens(count=64).reshape(16, 4, 8)
    whole = recipe(model=LanguageModel(seed=0), batches=batches, first_step=0)
    assert_trained_by_prokl(whole["optimizer"])
    assert_schedule_scales_every_group_alike(whole["optimizer"], 1.0)
    resumed = recipe(model=LanguageModel(seed=1), batches=batches, first_step=4)
    assert_same_weights(whole["model"], resumed["model"])


def test_peft_trains_adapters_alone_from_when_they_begin():
    pytest.importorskip("peft")
    (recipe,) = recipes("PEFT")
    before = llama(seed=0)
    trained = recipe(model=llama(seed=0), loader=loader(Labelled()))
    optimizer, after = trained["optimizer"], dict(trained["model"].named_parameters())
    assert_trained_by_prokl(optimizer)
    steps = {name: int(optimizer.state[p]["step"]) for name, p in after.items() if p in optimizer.state}
    assert len(steps) == 8 and all(count == (5 if "lora_A" in name else 7) for name, count in steps.items())
    for name, p in before.named_parameters():
        adapted = "base_model.model." + re.sub(r"([qv]_proj)", r"\1.base_layer", name)
        assert torch.equal(p, after[adapted])


def test_timm_trains_and_resumes_exactly(timm):
    (recipe,) = recipes("timm")
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows = loader([(image, index % 4) for index, image in enumerate(images)])

    def vit(seed):
        torch.manual_seed(seed)
        sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
        return timm.create_model("vit_tiny_patch16_224", num_classes=4, **sizes)

    whole = recipe(model=vit(seed=0), loader=rows, resume=None)
    assert_trained_by_prokl(whole["optimizer"])
    assert_schedule_scales_every_group_alike(whole["optimizer"], 0.0)
    resumed = recipe(model=vit(seed=1), loader=rows, resume="runs/timm/checkpoint-1.pth.tar")
    assert resumed["first_epoch"] == 2
    assert_same_weights(whole["model"], resumed["model"])
