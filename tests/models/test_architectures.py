"""A representative set of architectures, with all of their classes: nothing is refused, everything is where it belongs.

``make test-models`` runs all of them, and those of timm and torchvision, which have an environment of their own.
"""

from __future__ import annotations

import pytest

from tests.support.architectures import build_diffusers, build_transformers, transformers_classes

from .checks import Findings, check_model

# Language models: dense, with separate and with interleaved projections; mixtures whose experts are no stacks;
# recurrent ones.
PLAIN = (
    "llama qwen3 gemma3_text bloom falcon mpt opt codegen persimmon xlnet ctrl dbrx switch_transformers "
    "falcon_h1 recurrent_gemma lfm2 rwkv xlstm "
    # Encoders, with the heads of their tasks.
    "bert roberta albert mobilebert deberta layoutlmv3 t5 bart "
    # Vision, audio, several modalities.
    "vit swinv2 dinov2 convnextv2 levit resnet detr deformable_detr clip blip-2 llava "
    "whisper wav2vec2 hubert musicgen vits parakeet_ctc"
)
MIXTURES = "mixtral qwen3_moe gpt_oss aria_text deepseek_v4 granitemoe jetmoe olmoe minimax qwen3_next"
WITH_FUSED = "gpt2 gpt_neox gpt_bigcode glm4 openai-gpt jetmoe mamba2 zamba2 focalnet sam qwen2_5_vl"
# What the oracles must see at least: expert stacks and fused weights.
STACKS = {
    **dict.fromkeys(MIXTURES.split(), 12),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "kimi_linear"), 10),
    **dict.fromkeys(("llama4_text", "jamba"), 6),
}
FUSED = {
    **dict.fromkeys(("phi3", "deepseek_v3", "mamba", "modernbert"), 12),
    **dict.fromkeys(WITH_FUSED.split(), 6),
    "jamba": 10,
    "kimi_linear": 1,
    "nemotron_h": 1,
}
# Classes that transformers cannot build from their default configs.
NOT_BUILT = ("ConvNextV2Backbone", "FocalNetBackbone", "DetrForSegmentation", "MusicgenForCausalLM", "MusicgenModel")
DIFFUSERS = [
    "UNet2DConditionModel",
    "DiTTransformer2DModel",
    "FluxTransformer2DModel",
    "AutoencoderKL",
    "SD3Transformer2DModel",
]
CLASSES = list(transformers_classes())


def checked(findings: Findings) -> None:
    assert not findings.problems, "\n".join(findings.problems[:10])
    assert findings.counts["muon"] + findings.counts["adamw"] > 0


@pytest.mark.parametrize("model_type", sorted({*PLAIN.split(), *STACKS, *FUSED}))
def test_transformers(model_type: str) -> None:
    names = [name for known, name in CLASSES if known == model_type and name not in NOT_BUILT]
    assert names
    for name in names:
        findings = check_model(build_transformers(model_type, name))
        checked(findings)
        assert not findings.counts["warnings"]
        assert findings.counts["expert stacks"] >= STACKS.get(model_type, 0)
        assert findings.counts["fused weights"] >= FUSED.get(model_type, 0)


@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers(name: str) -> None:
    checked(check_model(build_diffusers(name)))
