"""QK-clip: after a step, rows of Wq and Wk of heads whose attention logits grew too large are scaled down.

γ = threshold / logit for a head whose largest logit exceeds the threshold, else 1. Its rows of Wq and of Wk are multiplied by √γ,
so that its logits become γ times what they were. Which rows these are is worked out once per layout, by global row, as one index
per device; a step then is one gather of factors and one multiplication per local tensor. The host never waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..errors import ConfigError, PlanError
from ..layout import Ranges, length
from ..params.dtensors import as_dtensor, layouts_of, siblings
from ..params.groups import matrix_options_of
from ..params.named_params import NamedParam
from ..torch_compat import local_part
from .heads import Found, Layer, check_overlap, read_layer
from .logits import check_logits, logits_text, ordered, whole_logits
from .names import ClipConfig, LayerKey, Projection, find_projection, read_clip_config

__all__ = ["QKClip"]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The projections of one device and dtype.

    Attributes:
        members: indices of the parameters.
        sizes: rows of each local tensor.
        entries: which logits each head has, filled up with the last, which is −∞.
        slots: for each row of the local tensors, one after the other, its factor.
        dtype: in which factors are computed.
    """

    members: tuple[int, ...]
    sizes: list[int]
    entries: Tensor
    slots: Tensor
    dtype: torch.dtype


class QKClip:
    """Scales rows of query and key projections after a step.

    Args:
        clip_config: the options (see docs/qk_clip.md); None for an object that only refuses logits.
    """

    def __init__(self, clip_config: Mapping[str, Any] | None) -> None:
        given = None if isinstance(clip_config, Mapping) and not clip_config else clip_config  # an empty one asks for nothing
        self._config = None if given is None else read_clip_config(given)
        self._given = None if given is None else dict(given)
        self._names: tuple[str, ...] = ()
        self._projections: list[tuple[int, Projection]] = []
        self._key: Hashable = None
        self._buckets: list[_Bucket] = []
        self.members: frozenset[int] = frozenset()  # places of the parameters that the last accepted logits clip
        self._nonfinite: int | Tensor = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return QKClip, (self._given,)  # all else is found again

    @property
    def nonfinite_logits(self) -> int:
        """How many logits so far were +∞ or NaN. Their heads were left as they were. On a GPU reading it waits for the device."""
        return int(self._nonfinite)

    def signature(self, qk_logits: Mapping[LayerKey, Tensor] | None) -> str:
        """What must be equal on all ranks that step together, as text; no tensor is read."""
        return logits_text(qk_logits)

    def check(self, parameters: Sequence[NamedParam], qk_logits: Mapping[LayerKey, Tensor] | None) -> None:
        """Raises ConfigError for logits that cannot be applied; writes nothing and does not communicate."""
        if qk_logits is None:
            return
        config, qk_logits = self._checked(qk_logits), ordered(qk_logits)
        if not qk_logits:
            raise ConfigError(
                "qk_logits is empty, so that nothing would be clipped. If it comes from MaxLogits.collect(), no forward has run "
                "inside collecting(); pass None for a step without clipping."
            )
        found = self._found(parameters, config)
        key = _key_of(found, qk_logits)
        if key == self._key:
            return
        layers = {layer: read_layer(layer, logits.numel(), found, config) for layer, logits in qk_logits.items()}
        check_overlap(layers)
        self._buckets = _buckets(layers, qk_logits)
        self.members = frozenset(place for bucket in self._buckets for place in bucket.members)
        self._key = key

    @torch.no_grad()
    def apply(
        self, parameters: Sequence[NamedParam], qk_logits: Mapping[LayerKey, Tensor] | None, skip_mask: Tensor | None = None
    ) -> None:
        """Scales the rows of all heads whose logit exceeds the threshold.

        Args:
            parameters: all parameters of the optimizer, already updated.
            qk_logits: layer → largest logit of each head, the same on all ranks that hold the layer. None does nothing.
            mask: a boolean on a device; nothing changes where it is true.
        """
        if qk_logits is None:
            return
        self.check(parameters, qk_logits)
        qk_logits = ordered(qk_logits)
        assert self._config is not None
        with record_function("meshmuon::qk_clip"):
            logits = whole_logits(qk_logits)
            for k, bucket in enumerate(self._buckets):
                near = _joined(logits, bucket)
                rows = torch.split(_row_factors(bucket, near, self._config.threshold, skip_mask), bucket.sizes)
                for member, factor in zip(bucket.members, rows, strict=True):
                    local = local_part(parameters[member].param)
                    if local.numel():
                        local.mul_(factor.view(-1, *[1] * (local.dim() - 1)))
                if k == 0:  # every bucket has the same logits
                    self._nonfinite = self._nonfinite + (near.isnan() | near.isposinf()).sum()

    def _checked(self, qk_logits: object) -> ClipConfig:
        if self._config is None:
            raise ConfigError(
                "qk_logits were passed to step(), but the optimizer has no clip_config. Write Muon(groups, "
                'clip_config={"head_dim": 128, "threshold": 100}), or leave qk_logits out.'
            )
        check_logits(qk_logits)
        return self._config

    def _found(self, parameters: Sequence[NamedParam], config: ClipConfig) -> list[Found]:
        names = tuple(one.name for one in parameters)
        if names != self._names:
            whats = ((place, find_projection(name, config)) for place, name in enumerate(names))
            self._projections = [(place, what) for place, what in whats if what is not None]
            self._names = names
        return [Found(what, parameters[place], place) for place, what in self._projections]


def _key_of(found: Sequence[Found], qk_logits: Mapping[LayerKey, Tensor]) -> Hashable:
    """Everything that the indices depend on."""
    return tuple(map(_signature, found)), tuple((layer, logits.numel()) for layer, logits in qk_logits.items())


def _signature(found: Found) -> Hashable:
    param = found.one.param
    sharded = as_dtensor(param)
    where = None if sharded is None else (sharded.device_mesh, sharded.placements)
    # A parameter may have been replaced by one of another shard; what it holds is known without a wait.
    local = tuple(local_part(param).shape)
    split = matrix_options_of(found.one.param_group).split if found.what.kind == "qkv" else None
    shape = tuple(param.shape)
    return (found.one.name, found.place, shape, local, where, param.device, param.dtype, param.requires_grad, split)


def _buckets(layers: Mapping[LayerKey, Layer], qk_logits: Mapping[LayerKey, Tensor]) -> list[_Bucket]:
    """All index tensors, on the devices where they are used."""
    heads: list[list[int]] = []
    chosen: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    logits = 0
    for key, layer in layers.items():
        first = {}
        for side, entries in layer.entries.items():
            first[side] = len(heads)
            heads += [[logits + entry for entry in one] for one in entries]
        logits += qk_logits[key].numel()
        for found, sections in layer.members:
            param = found.one.param
            if param.requires_grad:
                rows = _local_rows(found)
                slots = torch.zeros_like(rows)
                for section in sections:
                    slots += section.slots(rows, first[section.side])
                dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
                chosen.setdefault((param.device, dtype), []).append((found.place, slots))
    most = max((len(one) for one in heads), default=0)
    filled = torch.tensor([one + [logits] * (most - len(one)) for one in heads], dtype=torch.long)
    return [
        _Bucket(
            members=tuple(place for place, _ in members),
            sizes=[slots.numel() for _, slots in members],
            entries=filled.to(device),
            slots=torch.cat([slots for _, slots in members]).to(device),
            dtype=dtype,
        )
        for (device, dtype), members in chosen.items()
    ]


def _local_rows(found: Found) -> Tensor:
    """The global number of each row of the local tensor."""
    param = found.one.param
    sharded = as_dtensor(param)
    local = local_part(param)
    ranges: Ranges = ((0, param.shape[0]),)
    if sharded is not None:
        rank, shape = dist.get_rank(), tuple(param.shape)
        layouts = layouts_of(found.one.name, shape, sharded.placements, siblings(sharded.device_mesh), frozenset({rank}))
        held = layouts[0].local(rank) if layouts else ((),) * len(shape)
        ranges = held[0]
        if local.numel() and tuple(map(length, held)) != tuple(local.shape):
            raise PlanError(
                f"{found.one.name} is {layouts[0] if layouts else 'not on this rank'}, but this rank holds {tuple(local.shape)}: "
                "its shards are not what its placements say."
            )
    if not local.numel():
        return torch.zeros(0, dtype=torch.long)
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def _joined(logits: Sequence[Tensor], bucket: _Bucket) -> Tensor:
    """All logits one after the other, where and as the bucket needs them."""
    device = bucket.slots.device
    wait_free = device.type != "cpu"  # what comes to the host from elsewhere is not there before it has been waited for
    if len({one.device for one in logits}) > 1:
        logits = [one.to(device, non_blocking=wait_free) for one in logits]
    return torch.cat([one.to(bucket.dtype) for one in logits]).to(device, non_blocking=wait_free)


def _row_factors(bucket: _Bucket, logits: Tensor, threshold: float, skip_mask: Tensor | None) -> Tensor:
    """The factor of each row of the bucket's local tensors."""
    largest = torch.cat([logits, torch.full_like(logits[:1], -math.inf)])[bucket.entries].amax(1)
    # Clamped before the division: logits that are small, negative or −∞ give exactly 1.
    gamma = torch.full_like(largest, threshold) / largest.clamp(min=threshold)
    # +∞ gives 0 and NaN gives NaN: neither says by how much to scale, and both would destroy the head.
    usable = gamma > 0
    if skip_mask is not None:
        usable = usable & ~skip_mask.to(gamma.device, non_blocking=gamma.device.type != "cpu")
    gamma = torch.where(usable, gamma, 1.0)
    factors = torch.cat([torch.ones_like(gamma[:1]), torch.stack([gamma.sqrt(), gamma], 1).flatten()])
    return factors[bucket.slots]
