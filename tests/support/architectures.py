"""Architectures of model libraries on the meta device, with a few layers: no weight is ever allocated."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .optional import need

DEPTH = 6  # hybrid models have a layer of each kind among so many
_LAYERS = {
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
}
# before the first mixture
_DENSE_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "num_k_dense")
_NEEDED: Mapping[str, Mapping[str, Any]] = {  # what some configs do not default to
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "dots1": {"n_routed_experts": 8},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "wav2vec2-conformer": {"vocab_size": 32},
    # Their default backbones come from timm, which this environment may lack.
    "detr": {"backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}},
    "deformable_detr": {"backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]}},
}


def library(name: str) -> ModuleType:
    """A model library, without the warnings of its import."""
    logging.disable(logging.WARNING)
    try:
        return need(name)
    finally:
        logging.disable(logging.NOTSET)


def transformers_classes() -> Iterator[tuple[str, str]]:
    """All (model type, name of a model class) that transformers' auto classes know."""
    modeling = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = [
        getattr(modeling, name)
        for name in sorted(dir(modeling))
        if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL_")
    ]
    for model_type in library("transformers").CONFIG_MAPPING:
        names: dict[str, None] = {}
        for table in tables:
            classes = table.get(model_type, ())
            names |= dict.fromkeys([classes] if isinstance(classes, str) else classes)
        yield from ((model_type, name) for name in names)


def build_transformers(model_type: str, class_name: str, **overrides: Any) -> nn.Module:
    """A model of transformers from its default config, with few layers where the config allows it."""
    transformers = library("transformers")
    config_class, model_class = transformers.CONFIG_MAPPING[model_type], getattr(transformers, class_name)
    needed = {**_NEEDED.get(model_type, {}), **overrides}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            few = _fewer_layers(config_class(**needed))
            with contextlib.suppress(Exception):
                return _on_meta(model_class, config_class(**needed, **few))
            return _on_meta(model_class, config_class(**needed))
        finally:
            logging.disable(logging.NOTSET)


def _on_meta(model_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = (
            model_class._from_config(config) if hasattr(model_class, "_from_config") else model_class(config)
        )
    return model


def _fewer_layers(config: Any) -> dict[str, Any]:
    """Arguments of the config that make it shallow, also in the configs inside it."""
    config_type = library("transformers").PreTrainedConfig
    few: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, config_type):
            few |= {key: inner} if (inner := _fewer_layers(value)) else {}
        elif key in _LAYERS and isinstance(value, int) and value > DEPTH:
            few[key] = DEPTH
        elif key in _DENSE_LAYERS and isinstance(value, int) and value > 1:
            few[key] = 1
    return few


def build_timm(name: str) -> nn.Module:
    """A model of timm, as its name says; timm's models are small enough to be built whole."""
    timm = library("timm")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = timm.create_model(name, pretrained=False)
    return model


def timm_names(per_family: int = 2) -> list[str]:
    """Some models of every family of timm."""
    timm = library("timm")
    return [name for family in timm.list_modules() for name in timm.list_models(module=family)[:per_family]]


def build_torchvision(name: str) -> nn.Module:
    """A model of torchvision."""
    library("torchvision")
    models = importlib.import_module("torchvision.models")
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    needed = {"weights_backbone": None} if "weights_backbone" in accepted else {}  # nothing is downloaded
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = models.get_model(name, weights=None, **needed)
    return model


def torchvision_names() -> list[str]:
    """All models of torchvision."""
    library("torchvision")
    names: list[str] = importlib.import_module("torchvision.models").list_models()
    return names


def build_diffusers(name: str) -> nn.Module:
    """A model of diffusers from its default arguments, with few layers."""
    diffusers = library("diffusers")
    model_class = getattr(diffusers, name)
    defaults = inspect.signature(model_class.__init__).parameters
    few = {
        key: min(DEPTH, value.default)
        for key, value in defaults.items()
        if key in _LAYERS and isinstance(value.default, int)
    }
    few |= {key: 2 for key in ("num_single_layers", "num_refiner_layers") if key in defaults}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = model_class(**few)
    return model


def diffusers_names() -> list[str]:
    """All classes of models that diffusers exports."""
    diffusers = library("diffusers")
    names = [
        name
        for name in dir(diffusers)
        if re.search(r"(Model\d?D?\w*|Transformer\w*|Autoencoder\w*|UNet\w*|ControlNet\w*)$", name)
    ]
    classes = {name: getattr(diffusers, name, None) for name in names}
    return [name for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, nn.Module)]
