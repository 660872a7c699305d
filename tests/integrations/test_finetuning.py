"""Lightning's BackboneFinetuning, which adds groups without names and sets the lr of the last one by its place."""

import warnings

import pytest
import torch
from torch import nn

import prokl

lightning = pytest.importorskip("lightning")


class Labelled(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 12))
        self.head = nn.Linear(12, 3)

    def training_step(self, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.head(self.backbone(inputs)), labels)

    def configure_optimizers(self):
        return prokl.ProKLShampoo(prokl.param_groups(self, lr=0.02, adamw_lr=1e-3, rank=4, names=False))


def fit(model, epochs, folder, resume=None):
    from lightning.pytorch.callbacks import BackboneFinetuning

    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(3, (16,)))
    callback = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, lambda_func=lambda epoch: 0.5, should_align=False
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resume, weights_only=False)
    return trainer, [str(w.message) for w in caught if "without an algorithm" in str(w.message)]


def test_an_unfrozen_backbone_trains_and_resumes(tmp_path):
    torch.manual_seed(0)
    model = Labelled()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer, warned = fit(model, 3, tmp_path)
    (optimizer,) = trainer.optimizers
    assert len(warned) == 1 and "below 2-D" in warned[0] and "lr=0.001" in warned[0]
    names = {p: name for name, p in model.named_parameters()}
    groups = [(g["algorithm"], g["lr"], [names[p] for p in g["params"]]) for g in optimizer.param_groups]
    assert groups == [
        ("adamw", 1e-3, ["head.weight"]),
        ("adamw", 1e-3, ["head.bias"]),
        ("adamw", 1e-3, ["backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "backbone.3.bias"]),
        ("matrix", 0.005, ["backbone.0.weight", "backbone.3.weight"]),  # 0.01, halved by the callback's schedule
    ]
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]

    trainer.save_checkpoint(tmp_path / "third.ckpt")
    resumed = Labelled()
    again, warned = fit(resumed, 4, tmp_path, resume=tmp_path / "third.ckpt")
    assert not warned and again.current_epoch == 4
    assert [g["algorithm"] for g in again.optimizers[0].param_groups] == ["adamw", "adamw", "adamw", "matrix"]
    assert again.optimizers[0].param_groups[-1]["lr"] == 0.0025
