"""Trains by transformers' Trainer under FSDP2 and resumes, for torchrun."""

import shutil

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import prokl
from tests.integrations.models import Labelled, llama


def trained(seed, resume):
    model = llama(seed)
    sharding = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    sharding |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}
    arguments = TrainingArguments(
        "runs", max_steps=8, save_steps=4, per_device_train_batch_size=4, lr_scheduler_type="cosine", use_cpu=True,
        report_to="none", disable_tqdm=True, fsdp=True, fsdp_config=sharding,
    )  # fmt: skip
    groups = prokl.param_groups(model, lr=0.02, adamw_lr=3e-3)
    by_class = (prokl.ProKLShampoo, {"params": groups})
    trainer = Trainer(model, arguments, train_dataset=Labelled(), optimizer_cls_and_kwargs=by_class)
    trainer.train(resume_from_checkpoint=resume)
    (group,) = (g for g in trainer.optimizer.param_groups if g["algorithm"] == "matrix")
    assert all(hasattr(p, "device_mesh") for p in group["params"])
    assert group["param_names"] == [name for name, _ in model.named_parameters() if name.endswith("_proj.weight")]
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def main():
    whole = trained(seed=0, resume=None)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree("runs/checkpoint-8")
    dist.barrier()
    resumed = trained(seed=1, resume=True)
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    print("exact")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
