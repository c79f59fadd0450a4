"""The default param groups of a model: which parameters go to Muon and which to AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError
from ..matrices import MatrixOptions, check_expert_keys, check_matrix_options
from ..params.checks import shown
from ..params.flattened import refuse_flattened_model

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
_TOKEN_EMBEDDINGS = ("embed_tokens", "tok_embeddings", "token_embedding", "token_embeddings", "word_embeddings", "wte")
_POSITION_EMBEDDINGS = ("wpe", "position_embeddings", "pos_embed", "pos_embedding", "embed_positions")
_EMBEDDINGS = frozenset(("embed", "embedding", "embeddings", *_TOKEN_EMBEDDINGS, *_POSITION_EMBEDDINGS))
_HEADS = frozenset(
    ["lm_head", "head", "output", "embed_out", "unembed", "output_layer", "output_projection", "classifier", "score"]
)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # (in, out, *kernel): no (out, in·kernel) matrix
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def get_default_muon_param_groups(
    model: nn.Module,
    is_muon_func: Callable[[str, Tensor], bool] | None = None,
    expert_keys: Sequence[str] | None = None,
    *,
    conv: str | None = None,
) -> list[dict[str, Any]]:
    """Splits a model's trainable parameters into a Muon group and an AdamW group.

    Matrices go to Muon. Parameters of fewer than two dims, embeddings, output heads and everything tied to these go to AdamW.
    Embeddings and heads are recognised by module type and identity first, then by name.

    Args:
        model: the model. It may be wrapped by DDP, torch.compile or activation checkpointing.
        is_muon_func: ``(name, parameter) -> bool`` replaces the whole decision. It is not asked about frozen parameters and
            those of fewer than two dims.
        expert_keys: a 3-D parameter whose name contains one of these is a stack of expert matrices.
        conv: ``"flatten"`` sends convolution filters to Muon too, except depthwise ones.

    Returns:
        One or two param groups, each with ``params``, ``names`` and ``use_muon``, ready for ``Muon``. Empty ones are left out.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; get_default_muon_param_groups takes a torch.nn.Module.")
    if is_muon_func is not None and not callable(is_muon_func):
        raise ConfigError(f"is_muon_func={shown(is_muon_func)} must be a function of (name, parameter) that returns a bool.")
    keys = check_expert_keys(expert_keys)
    check_matrix_options(MatrixOptions(keys, conv))
    refuse_flattened_model(model)
    decide = _with_named_errors(is_muon_func) if is_muon_func is not None else _DefaultRoute(model, keys, conv)
    param_groups: dict[bool, dict[str, Any]] = {
        use_muon: {"params": [], "names": [], "use_muon": use_muon} for use_muon in (True, False)
    }
    for name, param in model.named_parameters():
        if param.requires_grad:
            param_group = param_groups[param.dim() >= 2 and bool(decide(name, param))]
            param_group["params"].append(param)
            param_group["names"].append(name)
    if keys:
        param_groups[True]["expert_keys"] = keys
    if conv is not None:
        param_groups[True]["conv"] = conv
    filled = [param_group for param_group in param_groups.values() if param_group["params"]]
    if not filled:
        raise ConfigError("the model has no trainable parameters: every requires_grad is False, or it has no parameters.")
    return filled


def _with_named_errors(is_muon_func: Callable[[str, Tensor], bool]) -> Callable[[str, Tensor], bool]:
    """``is_muon_func`` with errors that name the parameter."""

    def decide(name: str, param: Tensor) -> bool:
        try:
            return bool(is_muon_func(name, param))
        except Exception as error:
            raise ConfigError(f"is_muon_func failed for {name} with {type(error).__name__}: {error}") from error

    return decide


def name_parts(name: str) -> list[str]:
    """The components of a parameter's name, without those that wrappers insert."""
    return [part for part in name.split(".") if part not in _WRAPPERS]


class _DefaultRoute:
    """Decides whether a parameter of two or more dims goes to Muon."""

    def __init__(self, model: nn.Module, expert_keys: Sequence[str], conv: str | None) -> None:
        self._expert_keys = expert_keys
        self._conv = conv
        self._norms = {id(p) for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters()}
        self._tables = [_addresses(p) for p in _embedding_and_head_parameters(model)]
        self._filters = {id(module.weight): module for module in model.modules() if isinstance(module, _CONVOLUTIONS)}

    def __call__(self, name: str, param: Tensor) -> bool:
        addresses = _addresses(param)
        tied = any(addresses.start < table.stop and table.start < addresses.stop for table in self._tables)
        if tied or is_table_name(name):
            return False
        convolution = self._filters.get(id(param))
        if convolution is not None and not any(key in name for key in self._expert_keys):
            return self._conv == "flatten" and convolution.groups == 1 and not isinstance(convolution, _TRANSPOSED)
        return not self._is_vector(name, param)

    def _is_vector(self, name: str, param: Tensor) -> bool:
        """Whether it has several dims but is no matrix: norms, biases of experts, state-space decays, (1, tokens, dim) tokens."""
        last = name_parts(name)[-1]
        if id(param) in self._norms or last == "A_log" or last == "bias" or last.endswith("_bias"):
            return True
        return param.dim() > 2 and param.size(0) == 1 and not any(key in name for key in self._expert_keys)


def _embedding_and_head_parameters(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight
        get_head = getattr(module, "get_output_embeddings", None)
        if callable(get_head):
            try:
                head = get_head()
            except NotImplementedError:  # base classes may define the method without implementing it
                continue
            if isinstance(head, nn.Module):
                yield from head.parameters()


def _addresses(param: Tensor) -> range:
    """The memory addresses of a parameter. Tied parameters overlap; parameters that are views of one flat buffer do not."""
    start = param.data_ptr()
    if start == 0:  # a meta or empty tensor has no address, so it is tied to itself only
        return range(id(param), id(param) + 1)
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return range(start, start + (last + 1) * param.element_size())


def is_table_name(name: str) -> bool:
    """Whether a name is that of an embedding or an output head.

    A head's name counts only outside numbered blocks: ``output.weight`` is a head, ``layers.3.attention.output.weight`` is a
    projection. It must be the name of the module that holds the parameter: ``output.dense.weight`` is not a head.
    """
    modules = name_parts(name)[:-1] or name_parts(name)
    if any(part in _EMBEDDINGS for part in (*modules, *name_parts(name)[-1:])):
        return True
    return modules[-1] in _HEADS and not any(part.isdigit() for part in modules)
