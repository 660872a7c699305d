"""Trainers take settings beside the recipes of docs/integrations.md, and resume."""

import re
import shutil

import pytest
import torch
from torch.testing import assert_close

import prokl
from tests.integrations.models import (
    VOCABULARY,
    Labelled,
    LanguageModel,
    assert_same_weights,
    assert_schedule_scales_every_group_alike,
    assert_trained_by_prokl,
    llama,
    loader,
)
from tests.test_examples import run


def groups_of(model):
    return prokl.param_groups(model, lr=0.02, adamw_lr=3e-3)


def trainer_of(model, optimizer=prokl.ProKLShampoo, **settings):
    from transformers import Trainer, TrainingArguments

    settings = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 4, **settings}
    arguments = TrainingArguments("runs", use_cpu=True, report_to="none", **settings)
    by_class = (optimizer, {"params": groups_of(model)})
    data = {"train_dataset": Labelled(), "eval_dataset": Labelled()}
    return Trainer(model, arguments, **data, optimizer_cls_and_kwargs=by_class)


def mixture(seed):
    """Its experts are stored otherwise than they are trained; the resumed one comes from the checkpoint."""
    from transformers import MixtralConfig, MixtralForCausalLM

    if seed:
        return MixtralForCausalLM.from_pretrained("runs/checkpoint-4")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_local_experts=4, num_key_value_heads=2, **sizes))


def adapters(**options):
    """Return what makes a model with adapters, which alone are saved."""

    def make(seed):
        peft = pytest.importorskip("peft")
        model = llama(seed=0)
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(model, config)

    return make


EVERY_2, EVERY_4 = ({"eval_strategy": "steps", "eval_steps": steps} for steps in (2, 4))
RESUMED = {
    "bf16": (
        llama,
        {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "lr_scheduler_type": "cosine"},
    ),
    "compiled": (
        llama,
        {"torch_compile": True, "torch_compile_backend": "eager", "lr_scheduler_type": "polynomial"},
    ),
    "plateau": (llama, {"lr_scheduler_type": "reduce_lr_on_plateau", **EVERY_2}),
    "best model": (llama, {"load_best_model_at_end": True, **EVERY_4}),
    "KLShampoo": (llama, {"optimizer": prokl.KLShampoo}),
    "mixture": (mixture, {}),
    "DoRA": (adapters(use_dora=True), {}),
    "rsLoRA": (adapters(use_rslora=True), {}),
    "adapters and a head": (adapters(modules_to_save=["lm_head"]), {}),
}


@pytest.mark.parametrize(("make", "settings"), RESUMED.values(), ids=RESUMED)
def test_trainer_resumes_exactly_with_any_settings(make, settings):
    pytest.importorskip("transformers")
    whole = trainer_of(make(seed=0), **settings)
    whole.train()
    assert_trained_by_prokl(whole.optimizer)
    shutil.rmtree("runs/checkpoint-8")
    resumed = trainer_of(make(seed=1), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(whole.model, resumed.model)


@pytest.mark.slow
def test_the_trainer_example_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("transformers")
    load_file = pytest.importorskip("safetensors.torch").load_file
    tiny = ("--width", "32", "--steps", "20", "--save-every", "10")
    output = run(tmp_path, "train_hf.py", *tiny, "--folder", "whole")
    first, last = map(float, re.search(r"loss ([\d.]+) at first, ([\d.]+) at last", output).groups())
    assert last < first - 0.3 and "transformer.h.{0..3}.attn.c_attn.weight" in output and "split into 3" in output
    run(tmp_path, "train_hf.py", *tiny, "--folder", "parts", "--resume", "whole/checkpoint-10")
    whole, parts = (load_file(tmp_path / name / "checkpoint-20" / "model.safetensors") for name in ("whole", "parts"))
    assert_close(whole, parts, rtol=0, atol=0)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_accelerate_trains_in_mixed_precision(precision):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision=precision)
    model = LanguageModel(seed=0)
    optimizer = prokl.ProKLShampoo(groups_of(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    losses = []
    for _ in range(4):
        for batch in batches:
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        scheduler.step()
    assert_trained_by_prokl(optimizer)
    assert_schedule_scales_every_group_alike(optimizer, 0.5)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning_trains_manually_in_any_precision(precision):
    lightning = pytest.importorskip("lightning")

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.model = LanguageModel(seed=0)
            self.losses = []

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            loss = self.model(batch)
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()

        def configure_optimizers(self):
            optimizer = prokl.ProKLShampoo(groups_of(self))
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 64)]

    training = Training()
    trainer = lightning.Trainer(max_epochs=4, precision=precision, **QUIET)
    trainer.fit(training, loader())
    (optimizer,) = trainer.optimizers
    assert_trained_by_prokl(optimizer)
    assert_schedule_scales_every_group_alike(optimizer, 0.5)
    assert training.losses[-1] < 0.5 * training.losses[0]
