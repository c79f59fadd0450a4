"""Refuses parameters that a wrapper has flattened. Their matrices are no longer visible, so Muon cannot train them."""

from __future__ import annotations

import re
import sys

from torch import Tensor, nn

from ..errors import UnsupportedError
from ..torch_compat import is_unflattened

_WEIGHTED = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def refuse_flattened(name: str, param: Tensor) -> None:
    """Raises UnsupportedError for a parameter that a known wrapper has flattened."""
    last, wrapper = name.rpartition(".")[2], ""
    if hasattr(param, "ds_id"):
        wrapper = "DeepSpeed ZeRO-3"
    elif getattr(param, "_is_flat_param", False):
        wrapper = "FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel)"
    elif type(param).__name__ == "FlatParameter" or (
        param.dim() == 1 and re.fullmatch(r"_?flat_param|flat_param_.*", last)
    ):
        wrapper = "a wrapper of FSDP1's kind (torch's or fairscale's)"
    if wrapper:
        raise _refusal(f"{name} has shape {tuple(param.shape)}", wrapper)


def refuse_flattened_model(model: nn.Module) -> None:
    """Raises UnsupportedError for a model whose matrices a wrapper has replaced by flat buffers, or whose classes
    are lost.
    """
    for name, param in model.named_parameters():
        refuse_flattened(name, param)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, no model is wrapped
    for path, module in model.named_modules():
        if is_unflattened(module):
            raise UnsupportedError(
                f"{path or 'the model'} was traced by torch.export, as pipelining does, which keeps no classes, and "
                "these tell what a parameter is. Write Muon(stage.named_parameters(), lr=...), which routes by names "
                "and shapes."
            )
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel) and not _keeps_shapes(module, fsdp):
            raise _refusal(path or "the model", "FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel)")
        weight = getattr(module, "weight", None)
        if (
            isinstance(module, _WEIGHTED)
            and isinstance(weight, nn.Parameter)
            and weight.requires_grad
            and weight.dim() < 2
        ):
            what = f"{path}.weight of a {type(module).__name__} has shape {tuple(weight.shape)}"
            raise _refusal(what, "a wrapper such as FSDP1, DeepSpeed ZeRO or fairscale")


def _keeps_shapes(module: nn.Module, fsdp: object) -> bool:
    """Whether FSDP1 has kept whole parameters: it does with NO_SHARD and use_orig_params=True."""
    strategies = getattr(fsdp, "ShardingStrategy", None)
    unsharded = getattr(module, "sharding_strategy", None) is getattr(strategies, "NO_SHARD", strategies)
    return unsharded and bool(getattr(module, "_use_orig_params", False))


def _refusal(what: str, wrapper: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: {wrapper} has flattened the weights, so that there are no matrices to orthogonalise, and AdamW "
        "would train everything instead of Muon. Shard the unwrapped model with FSDP2, "
        "torch.distributed.fsdp.fully_shard, which keeps every matrix, and build the optimizer after that."
    )
