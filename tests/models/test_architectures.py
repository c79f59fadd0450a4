"""A representative set of architectures: nothing is refused, everything is where it belongs.

``make test-models`` runs all of them, and those of timm and torchvision, which have an environment of their own.
"""

from __future__ import annotations

import pytest

from tests.support.architectures import build_diffusers, build_transformers

from .checks import Findings, check_model

# Model type, class, and how many expert stacks and fused weights the oracles must see at least.
TRANSFORMERS = {
    # Dense language models, with separate, fused and interleaved projections.
    "llama": ("LlamaForCausalLM", 0, 0),
    "qwen3": ("Qwen3ForCausalLM", 0, 0),
    "gemma3_text": ("Gemma3ForCausalLM", 0, 0),
    "gpt2": ("GPT2LMHeadModel", 0, 6),
    "gpt_neox": ("GPTNeoXForCausalLM", 0, 6),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", 0, 6),
    "bloom": ("BloomForCausalLM", 0, 0),
    "falcon": ("FalconForCausalLM", 0, 0),
    "mpt": ("MptForCausalLM", 0, 0),
    "opt": ("OPTForCausalLM", 0, 0),
    "codegen": ("CodeGenForCausalLM", 0, 0),
    "phi3": ("Phi3ForCausalLM", 0, 12),
    "glm4": ("Glm4ForCausalLM", 0, 6),
    "persimmon": ("PersimmonForCausalLM", 0, 0),
    "xlnet": ("XLNetLMHeadModel", 0, 0),
    "ctrl": ("CTRLLMHeadModel", 0, 0),
    "openai-gpt": ("OpenAIGPTLMHeadModel", 0, 6),
    # Mixtures of experts.
    "mixtral": ("MixtralForCausalLM", 12, 0),
    "qwen3_moe": ("Qwen3MoeForCausalLM", 12, 0),
    "gpt_oss": ("GptOssForCausalLM", 12, 0),
    "llama4_text": ("Llama4ForCausalLM", 6, 0),
    "aria_text": ("AriaTextForCausalLM", 12, 0),
    "dbrx": ("DbrxForCausalLM", 0, 0),
    "deepseek_v3": ("DeepseekV3ForCausalLM", 10, 12),
    "deepseek_v4": ("DeepseekV4Model", 12, 0),
    "glm4_moe": ("Glm4MoeForCausalLM", 10, 0),
    "granitemoe": ("GraniteMoeForCausalLM", 12, 0),
    "jetmoe": ("JetMoeForCausalLM", 12, 6),
    "olmoe": ("OlmoeForCausalLM", 12, 0),
    "kimi_linear": ("KimiLinearForCausalLM", 10, 1),
    "minimax": ("MiniMaxForCausalLM", 12, 0),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", 0, 0),
    # State-space models, linear attention, hybrids.
    "mamba": ("MambaForCausalLM", 0, 12),
    "mamba2": ("Mamba2ForCausalLM", 0, 6),
    "falcon_h1": ("FalconH1ForCausalLM", 0, 0),
    "jamba": ("JambaForCausalLM", 6, 10),
    "zamba2": ("Zamba2ForCausalLM", 0, 6),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", 0, 0),
    "qwen3_next": ("Qwen3NextForCausalLM", 12, 0),
    "nemotron_h": ("NemotronHForCausalLM", 0, 1),
    "lfm2": ("Lfm2ForCausalLM", 0, 0),
    "rwkv": ("RwkvForCausalLM", 0, 0),
    "xlstm": ("xLSTMForCausalLM", 0, 0),
    # Encoders, with the heads of their tasks.
    "bert": ("BertForMaskedLM", 0, 0),
    "roberta": ("RobertaForSequenceClassification", 0, 0),
    "albert": ("AlbertForMaskedLM", 0, 0),
    "mobilebert": ("MobileBertForMaskedLM", 0, 0),
    "modernbert": ("ModernBertForSequenceClassification", 0, 12),
    "deberta": ("DebertaForSequenceClassification", 0, 0),
    "layoutlmv3": ("LayoutLMv3ForTokenClassification", 0, 0),
    "t5": ("T5ForConditionalGeneration", 0, 0),
    "bart": ("BartForSequenceClassification", 0, 0),
    # Vision, audio, several modalities.
    "vit": ("ViTForImageClassification", 0, 0),
    "swinv2": ("Swinv2ForImageClassification", 0, 0),
    "dinov2": ("Dinov2ForImageClassification", 0, 0),
    "convnextv2": ("ConvNextV2ForImageClassification", 0, 0),
    "levit": ("LevitForImageClassification", 0, 0),
    "focalnet": ("FocalNetForImageClassification", 0, 6),
    "resnet": ("ResNetForImageClassification", 0, 0),
    "detr": ("DetrForObjectDetection", 0, 0),
    "deformable_detr": ("DeformableDetrForObjectDetection", 0, 0),
    "sam": ("SamModel", 0, 6),
    "clip": ("CLIPModel", 0, 0),
    "blip-2": ("Blip2ForConditionalGeneration", 0, 0),
    "llava": ("LlavaForConditionalGeneration", 0, 0),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", 0, 6),
    "whisper": ("WhisperForConditionalGeneration", 0, 0),
    "wav2vec2": ("Wav2Vec2ForCTC", 0, 0),
    "hubert": ("HubertForCTC", 0, 0),
    "musicgen": ("MusicgenForConditionalGeneration", 0, 0),
    "vits": ("VitsModel", 0, 0),
    "parakeet_ctc": ("ParakeetForCTC", 0, 0),
}
DIFFUSERS = ["UNet2DConditionModel", "DiTTransformer2DModel", "FluxTransformer2DModel", "AutoencoderKL", "SD3Transformer2DModel"]


def checked(findings: Findings) -> None:
    assert not findings.problems, "\n".join(findings.problems[:10])
    assert findings.counts["muon"] + findings.counts["adamw"] > 0


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_transformers(model_type: str) -> None:
    class_name, stacks, fused = TRANSFORMERS[model_type]
    findings = check_model(build_transformers(model_type, class_name))
    checked(findings)
    assert not findings.counts["warnings"]
    assert findings.counts["expert stacks"] >= stacks
    assert findings.counts["fused weights"] >= fused


@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers(name: str) -> None:
    checked(check_model(build_diffusers(name)))
