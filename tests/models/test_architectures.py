"""A representative set of architectures, with all of their classes: nothing is refused, everything is where it belongs.

``make test-models`` runs all of them, and those of timm and torchvision, which have an environment of their own.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.support.architectures import build_diffusers, build_transformers, transformers_classes

from .checks import Findings, check_model

# Language models: dense, with separate and with interleaved projections; mixtures whose experts are no stacks; recurrent ones.
PLAIN = (
    "llama qwen3 gemma3_text bloom falcon mpt opt codegen persimmon xlnet ctrl dbrx switch_transformers "
    "falcon_h1 recurrent_gemma lfm2 rwkv xlstm "
    # Encoders, with the heads of their tasks.
    "bert roberta albert mobilebert deberta layoutlmv3 t5 bart "
    # Vision, audio, several modalities.
    "vit swinv2 dinov2 convnextv2 levit resnet detr deformable_detr clip blip-2 llava "
    "whisper wav2vec2 hubert musicgen vits parakeet_ctc"
)
# In these the oracles must see what they are for.
STACKS = (
    "mixtral qwen3_moe gpt_oss llama4_text aria_text deepseek_v3 deepseek_v4 glm4_moe granitemoe jetmoe olmoe "
    "kimi_linear minimax jamba qwen3_next"
)
FUSED = (
    "gpt2 gpt_neox gpt_bigcode phi3 glm4 openai-gpt deepseek_v3 jetmoe kimi_linear mamba mamba2 jamba zamba2 "
    "nemotron_h modernbert focalnet sam qwen2_5_vl"
)
DIFFUSERS = ["UNet2DConditionModel", "DiTTransformer2DModel", "FluxTransformer2DModel", "AutoencoderKL", "SD3Transformer2DModel"]
CLASSES = list(transformers_classes())


def checked(findings: Findings) -> None:
    assert not findings.problems, "\n".join(findings.problems[:10])
    assert findings.counts["muon"] + findings.counts["adamw"] > 0


@pytest.mark.parametrize("model_type", sorted({*PLAIN.split(), *STACKS.split(), *FUSED.split()}))
def test_transformers(model_type: str) -> None:
    models = []
    for class_name in (name for known, name in CLASSES if known == model_type):
        with contextlib.suppress(Exception):  # some need another package, or have no usable default config
            models.append(build_transformers(model_type, class_name))
    assert models
    for findings in map(check_model, models):
        checked(findings)
        assert not findings.counts["warnings"]
        assert findings.counts["expert stacks"] or model_type not in STACKS.split()
        assert findings.counts["fused weights"] or model_type not in FUSED.split()


@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers(name: str) -> None:
    checked(check_model(build_diffusers(name)))
