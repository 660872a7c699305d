"""Some 60 architectures as their libraries build them, with random weights and small sizes; where their weights go.

No hidden size is a vocabulary's (97) or a number of labels (3, of images 5), but where the architecture's name says so.
As a command, ``python -m tests.integrations.architectures``, this writes the table anew; read every line that changed.
"""

import csv
import re
import sys
from pathlib import Path

import diffusers
import peft
import transformers

import prokl

TABLE = Path(__file__).parent.parent / "data" / "architectures.csv"
COLUMNS = ("architecture", "weight", "algorithm", "reason")

TEXT = {"vocab_size": 97, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = TEXT | SIZES | {"max_position_embeddings": 64}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = TEXT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PAIR = {f"{part}_{key}": v for part in ("encoder", "decoder") for key, v in (("attention_heads", 4), ("ffn_dim", 48))}
PAIR |= {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
BART = TEXT | PAIR | {"max_position_embeddings": 64}
T5 = TEXT | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VISION = SIZES | {"image_size": 32, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}


def hf(model, config=None, **options):
    """Return a builder of transformers' ``model`` from ``config``, or from the one that the model's class names."""

    def build():
        cls = getattr(transformers, model)
        made = getattr(transformers, config) if config else cls.config_class
        return cls(made(**options))

    return build


def lora(base, **options):
    """Return a builder of ``base`` with peft's low-rank adapters."""
    return lambda: peft.get_peft_model(base(), peft.LoraConfig(r=4, **options))


def diffuser(model, **options):
    """Return a builder of diffusers' ``model``."""
    return lambda: getattr(diffusers, model)(**options)


GPT2_LM = hf("GPT2LMHeadModel", **GPT2)
LLAMA_LABELS = hf("LlamaForSequenceClassification", **DECODER)

ARCHITECTURES = {
    # decoders
    "gpt2": GPT2_LM,
    "gpt2-double-heads": hf("GPT2DoubleHeadsModel", **GPT2),
    "gpt2-cross-attention": hf("GPT2LMHeadModel", **GPT2, add_cross_attention=True),
    "gpt-neox": hf("GPTNeoXForCausalLM", **ENCODER),
    "gpt-bigcode": hf("GPTBigCodeForCausalLM", **GPT2),
    "gptj": hf("GPTJForCausalLM", **GPT2, rotary_dim=4),
    "codegen": hf("CodeGenForCausalLM", **GPT2, rotary_dim=4),
    "bloom": hf("BloomForCausalLM", **TEXT, hidden_size=32, n_layer=2, n_head=4),
    "falcon": hf("FalconForCausalLM", **ENCODER, new_decoder_architecture=True, num_kv_heads=2),
    "opt": hf("OPTForCausalLM", **ENCODER, ffn_dim=48, word_embed_proj_dim=16),
    "dbrx": hf(
        "DbrxForCausalLM",
        **TEXT,
        d_model=32,
        n_layers=1,
        n_heads=4,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
    "llama": hf("LlamaForCausalLM", **DECODER),
    "llama-vocabulary-as-wide-as-hidden": hf("LlamaForCausalLM", **DECODER | {"vocab_size": 32}),
    "llama-labels": LLAMA_LABELS,
    "phi3": hf("Phi3ForCausalLM", **DECODER),
    "mistral": hf("MistralForCausalLM", **DECODER),
    "qwen3": hf("Qwen3ForCausalLM", **DECODER | {"head_dim": 12}),
    "qwen3-next": hf(
        "Qwen3NextForCausalLM",
        **DECODER,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "gemma3": hf("Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER),
    "mixtral": hf("MixtralForCausalLM", **DECODER, **EXPERTS),
    "gpt-oss": hf("GptOssForCausalLM", **DECODER, **EXPERTS),
    "llama4": hf(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        **DECODER,
        intermediate_size_mlp=40,
        num_local_experts=4,
        interleave_moe_layer_step=2,
    ),
    "deepseek-v3": hf(
        "DeepseekV3ForCausalLM",
        **ENCODER,
        num_key_value_heads=2,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    "mamba": hf("MambaForCausalLM", **TEXT, hidden_size=32, state_size=8, num_hidden_layers=2),
    "granite-hybrid": hf(
        "GraniteMoeHybridForCausalLM",
        **DECODER | {"num_hidden_layers": 1},
        **EXPERTS,
        shared_intermediate_size=24,
        layer_types=["full_attention"],
        mamba_n_heads=4,
        mamba_d_head=16,
    ),
    "rwkv": hf("RwkvForCausalLM", **TEXT, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
    # encoders
    "bert-pretraining": hf("BertForPreTraining", **ENCODER),
    "bert-multiple-choice": hf("BertForMultipleChoice", **ENCODER),
    "roberta-masked": hf("RobertaForMaskedLM", **ENCODER),
    "electra-pretraining": hf("ElectraForPreTraining", **ENCODER, embedding_size=16),
    "electra-masked": hf("ElectraForMaskedLM", **ENCODER, embedding_size=16),
    "albert-pretraining": hf("AlbertForPreTraining", **ENCODER, embedding_size=16),
    "deberta": hf("DebertaForMaskedLM", **ENCODER),
    "deberta-v2-tokens": hf("DebertaV2ForTokenClassification", **ENCODER, relative_attention=True, position_buckets=8),
    "distilbert-answers": hf(
        "DistilBertForQuestionAnswering",
        **TEXT | {"num_labels": 2},
        dim=32,
        hidden_dim=48,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    "modernbert": hf("ModernBertForMaskedLM", **ENCODER),
    "modernbert-labels": hf("ModernBertForSequenceClassification", **ENCODER),
    "xlnet-labels": hf("XLNetForSequenceClassification", **TEXT, d_model=32, n_layer=2, n_head=4, d_inner=48),
    # encoder and decoder
    "t5": hf("T5ForConditionalGeneration", **T5),
    "switch": hf(
        "SwitchTransformersForConditionalGeneration",
        **T5,
        num_experts=4,
        expert_capacity=8,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    "bart-labels": hf("BartForSequenceClassification", **BART),
    # sound
    "whisper": hf("WhisperForConditionalGeneration", **BART | {"num_mel_bins": 8}),
    "wav2vec2-ctc": hf(
        "Wav2Vec2ForCTC",
        **ENCODER,
        conv_dim=(8, 8),
        conv_stride=(2, 2),
        conv_kernel=(3, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    ),
    "moonshine": hf(
        "MoonshineForConditionalGeneration",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        **{f"{part}_num_hidden_layers": 1 for part in ("encoder", "decoder")},
        **{
            f"{part}_num_{heads}": 4
            for part in ("encoder", "decoder")
            for heads in ("attention_heads", "key_value_heads")
        },
    ),
    "bark": hf(
        "BarkSemanticModel",
        input_vocab_size=97,
        output_vocab_size=97,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        block_size=64,
    ),
    # images
    "vit-labels": hf("ViTForImageClassification", **VISION, num_labels=5),
    "timesformer-labels": hf("TimesformerForVideoClassification", **VISION, num_labels=5, num_frames=2),
    "sam-image": hf("SamVisionModel", **VISION, output_channels=12, global_attn_indexes=[1], mlp_dim=48),
    "swin-labels": hf(
        "SwinForImageClassification",
        num_labels=5,
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "convnext-labels": hf(
        "ConvNextForImageClassification", num_labels=5, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
    ),
    "mobilenet-v2-labels": hf("MobileNetV2ForImageClassification", num_labels=5, depth_multiplier=0.25),
    "segformer": hf(
        "SegformerForSemanticSegmentation",
        num_labels=5,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=12,
    ),
    "detr": lambda: transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            **PAIR,
            num_labels=5,
            num_queries=7,
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=transformers.ResNetConfig(**RESNET, out_features=["stage2"]),
        )
    ),
    "clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(text_config=ENCODER, vision_config=VISION, projection_dim=24)
    ),
    # adapters
    "lora-gpt2": lora(GPT2_LM, target_modules=["c_attn", "lm_head"], fan_in_fan_out=True),
    "lora-llama-labels": lora(LLAMA_LABELS, task_type="SEQ_CLS", target_modules=["q_proj"]),
    "lora-llama-saved-head": lora(
        hf("LlamaForCausalLM", **DECODER), target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
    ),
    # diffusion
    "unet-text": diffuser(
        "UNet2DConditionModel",
        **UNET,
        cross_attention_dim=12,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "vae": diffuser("AutoencoderKL", block_out_channels=(8,), layers_per_block=1, norm_num_groups=4),
    "dit": diffuser(
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=1,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=5,
    ),
    "flux": diffuser(
        "FluxTransformer2DModel",
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        axes_dims_rope=(4, 4, 8),
    ),
}

# timm's, which needs torchvision: the model's name and its options.
TIMM = {
    "timm-deit-distilled": ("deit_tiny_distilled_patch16_224", {"embed_dim": 32, "depth": 2, "num_heads": 4}),
    "timm-convnext": ("convnext_atto", {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}),
    "timm-mobilenet-v3": ("mobilenetv3_small_050", {}),  # its conv_head is no head
}


def build_timm(timm, name):
    """Build a model of :data:`TIMM` with 5 labels where nothing else is said."""
    model, options = TIMM[name]
    return timm.create_model(model, **({"num_classes": 5} | options))


def lines(name, model):
    """Return the table's lines of one architecture: a line per weight, and one for all copies of it that are alike.

    Left out is what is frozen, and what has less than two dimensions, which goes to AdamW.
    """
    found = {}
    for route in prokl.param_groups(model, lr=0.02, adamw_lr=1e-3, split_fused=True).routes:
        if len(route.shape) < 2:
            assert route.algorithm != "matrix", route
        elif not route.frozen:
            reason = re.sub(r", flattened to \d+x\d+", ", flattened", route.reason)
            copies = found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", route.names[0]), {})
            copies[route.names[0]] = route.algorithm, reason
    alike = {pattern: len({*copies.values()}) == 1 for pattern, copies in found.items()}
    return [
        (name, pattern if alike[pattern] else weight, *told)
        for pattern, copies in found.items()
        for weight, told in [*copies.items()][: 1 if alike[pattern] else None]
    ]


def recorded():
    """Return the table's lines by architecture."""
    found = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for line in csv.reader(file):
            found.setdefault(line[0], []).append(tuple(line))
    assert found.pop(COLUMNS[0]) == [COLUMNS]
    return found


def main():
    """Write the table; architectures of timm, where it cannot be imported, keep their lines."""
    now = {name: lines(name, build()) for name, build in ARCHITECTURES.items()}
    try:
        import timm

        now |= {name: lines(name, build_timm(timm, name)) for name in TIMM}
    except (ImportError, RuntimeError) as error:
        print(f"timm cannot be imported ({error}): its lines stay as they are", file=sys.stderr)
        now |= {name: found for name, found in recorded().items() if name in TIMM}
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(line for found in now.values() for line in found)


if __name__ == "__main__":
    main()
