"""Models that exist as code: a user's function or a configuration of transformers, built on the meta device."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...matrices import check_matrices, entry_of, with_stars
from ...routing.param_groups import get_default_muon_param_groups
from .description import ModelDescription, ModelParam
from .inputs import read_file

# transformers' names of ways to cut a weight that begin with one of ours; every other way leaves the weight whole.
_OF_TRANSFORMERS = re.compile(r"(?:local_)?((?:packed_)?colwise|rowwise)(?:_\w+)?")
# As torchtitan cuts them. transformers' own plan of the DeepSeek architecture leaves attention whole on every rank, and
# that of gpt-oss is for inference.
_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_EXPERTS = {"experts.gate_up_proj": "colwise", "experts.gate_up_proj_bias": "colwise", "experts.down_proj": "rowwise"}
_AS_TORCHTITAN: dict[str, dict[str, str]] = {
    "deepseek_v3": {"self_attn.q_b_proj": "colwise", "self_attn.kv_b_proj": "colwise", "self_attn.o_proj": "rowwise"},
    "gpt_oss": {**_ATTENTION, **_EXPERTS},
}
_MOST_LAYERS = 10_000
_TABLES = {"embed_tokens": "colwise", "lm_head": "colwise"}  # both are cut along the vocabulary


def describe_module(
    model: nn.Module, name: str, *, tp_plan: Mapping[str, str] | None = None, experts_per_token: int = 0
) -> ModelDescription:
    """A model of any kind, routed as ``get_default_muon_param_groups`` routes it.

    Args:
        model: the model; on the meta device it takes no memory.
        name: what reports call it.
        tp_plan: how tensor parallelism cuts it, in transformers' words, by the end of the name of a module or
            parameter, with * for numbers; None if it has no such plan.
        experts_per_token: number of experts that a token uses.
    """
    muon: set[str] = set()
    matrices: Mapping[str, Any] = {}
    for group in get_default_muon_param_groups(model):
        if group["use_muon"]:
            muon, matrices = set(group["names"]), check_matrices(group.get("matrices"))
    params = []
    for param_name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        inside = entry_of(matrices, param_name) if param_name in muon else None
        shape = tuple(param.shape)
        expert = (inside is not None and inside.experts is True) or bool(re.search(r"\.experts\.\w+_bias$", param_name))
        style = _style(param_name, len(shape), tp_plan or {})
        params.append(ModelParam(param_name, shape, param_name in muon, inside, style, expert, _layer(param_name)))
    return ModelDescription(
        name=name,
        title=name,
        source=f"{type(model).__module__}.{type(model).__qualname__}",
        params=tuple(params),
        experts_per_token=experts_per_token,
        has_tp_plan=bool(tp_plan),
    )


def import_function(target: str) -> Callable[..., Any]:
    """What ``package.module:function`` names, also in the working directory."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"--module {target!r} must name a module and a function in it: package.module:function.")
    paths = list(sys.path)
    sys.path.insert(0, "")  # the working directory, as python -m has it
    try:
        with _in_words(
            f"--module {target}: {module_name} cannot be imported", "Mend it, or set PYTHONPATH if it is elsewhere."
        ):
            function = getattr(importlib.import_module(module_name), function_name, None)
    finally:
        sys.path[:] = paths
    if not callable(function):
        raise ConfigError(f"--module {target}: {module_name} has no function {function_name}.")
    return function  # type: ignore[no-any-return]


def build_module(target: str) -> ModelDescription:
    """The model that ``package.module:function`` returns, called without arguments on the meta device."""
    build, name = import_function(target), target.partition(":")[2]
    advice = "It must build the model without arguments, data or weights."
    with _in_words(f"--module {target}: {name}() failed on the meta device", advice), torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--module {target}: {name}() returned {type(model).__name__}, not a torch.nn.Module.")
    with _in_words(f"--module {target}: the parameters of the model cannot be read", advice):
        return describe_module(model, target, tp_plan=_tp_plan_of(model))


@contextmanager
def _in_words(what: str, advice: str) -> Iterator[None]:
    """Whatever code that is not ours raises becomes a sentence, SystemExit as well: it would end the command in
    silence.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        text = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split())[:300])))
        raise ConfigError(f"{what}: {text}. {advice}") from error


def build_from_hf_config(path: Path) -> ModelDescription:
    """The model of a ``config.json`` of transformers, without weights and without network."""
    content = read_file(f"--hf-config {path}", path, json.loads, "is not JSON")
    kind = content.get("model_type") if isinstance(content, dict) else None
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"--hf-config needs transformers ({error}): pip install 'meshmuon[hf]'.") from None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"--hf-config {path}: model_type is {str(kind)[:120]!r}, which the installed transformers does not know. "
            "Upgrade it, or build the model yourself with --module package.module:function."
        )
    _check_layers(path, content)
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # the sentence below says what matters
    try:
        with _in_words(
            f"--hf-config {path}: transformers cannot build a {kind} model from it", "Correct the value, or the key."
        ):
            return describe_hf(transformers.CONFIG_MAPPING[kind].from_dict(content), name)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _check_layers(path: Path, content: Mapping[str, Any]) -> None:
    """Refuses more layers than could be built in minutes, also in the configurations of parts of the model."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            _check_layers(path, value)
        elif "layer" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise ConfigError(f"--hf-config {path}: {key} is {str(value)[:40]}. A model has at most {_MOST_LAYERS:,}.")


def describe_hf(config: Any, name: str) -> ModelDescription:
    with torch.device("meta"):
        model = _auto_model(config)
    text = config.get_text_config()
    per_token = next(
        (
            int(getattr(text, key))
            for key in ("num_experts_per_tok", "num_experts_per_token")
            if getattr(text, key, None)
        ),
        0,
    )
    return describe_module(model, name, tp_plan=_tp_plan_of(model), experts_per_token=per_token)


def _auto_model(config: Any) -> nn.Module:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if isinstance(name, str) and hasattr(transformers, name):
            return getattr(transformers, name)(config)  # type: ignore[no-any-return]
    for known_models in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in known_models:
            found = known_models[type(config)]
            return (found[0] if isinstance(found, tuple) else found)(config)  # type: ignore[no-any-return]
    raise ConfigError(f"transformers has no model for a {type(config).__name__}.")


def _tp_plan_of(model: nn.Module) -> dict[str, str] | None:
    """How transformers, and where it says too little torchtitan, cut the model's weights; None if neither does."""
    config = getattr(model, "config", None)
    plan = dict(getattr(config, "base_model_tp_plan", None) or {}) | _AS_TORCHTITAN.get(
        getattr(config, "model_type", ""), {}
    )
    return {**plan, **_TABLES} if plan else None


def _style(name: str, dims: int, tp_plan: Mapping[str, str]) -> str:
    """How tensor parallelism cuts a parameter. A bias is cut with the outputs of its weight."""
    base, _, last = name.rpartition(".")
    candidates = [name, base] if last in ("weight", "bias") else [name]
    for end, words in tp_plan.items():
        if any(f".{with_stars(candidate)}".endswith(f".{end}") for candidate in candidates):
            match = _OF_TRANSFORMERS.fullmatch(words)
            style = "replicate" if match is None else match[1]
            return style if style == "colwise" or (dims > 1 and not name.endswith("bias")) else "replicate"
    return "replicate"


def _layer(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
