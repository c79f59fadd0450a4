"""QK-clip: after a step, scales down the rows of Wq and Wk of heads whose attention logits have grown too large.

For a head whose largest logit exceeds the threshold, γ = threshold / logit; for all others γ = 1. The head's rows of Wq
and of Wk are multiplied by √γ, so its logits become γ times what they were.

Which rows belong to which head is worked out once per layout, from global row numbers, as one index tensor per device.
A step then takes one gather of factors and one multiplication per local tensor. The host never waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import copy_to
from ..errors import ConfigError, PlanError
from ..layout import length
from ..params.dtensors import held_ranges, layout_text
from ..params.param_record import ParamRecord
from ..torch_compat import local_part, profiler_range
from .logits import check_logits, ordered, whole_logits
from .projections import HeadTable, LayerKey, Projection, find_projections, read_clip_config


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The projections of one device and dtype."""

    members: tuple[int, ...]  # indices of the parameters
    sizes: list[int]  # number of rows of each local tensor
    heads_of_logits: Tensor  # (2 · logits,): the query head of each logit, then the key head of each
    head_count: int  # query and key heads of all layers
    # (sum of sizes,): for each row of the local tensors, one tensor after the other, the index of its factor
    slots: Tensor
    dtype: torch.dtype  # in which factors are computed


class QKClip:
    """Scales rows of query and key projections after a step. Without a ``clip_config`` (docs/qk_clip.md) it refuses
    logits.
    """

    def __init__(self, clip_config: Mapping[str, Any] | None) -> None:
        # an empty mapping turns it off
        given = None if isinstance(clip_config, Mapping) and not clip_config else clip_config
        self._config = None if given is None else read_clip_config(given)
        self._given = None if given is None else dict(given)
        self._records: Sequence[ParamRecord] | None = None  # a step replaces them whenever a parameter changes
        self._projections: list[Projection] = []  # among them
        self._key: Hashable = None  # what else the buckets were built from
        self._buckets: list[_Bucket] = []
        self.clipped: frozenset[int] = frozenset()  # indices of the parameters that the last accepted logits clip
        self._nonfinite: int | Tensor = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return QKClip, (self._given,)  # everything else is rebuilt

    @property
    def nonfinite_logits(self) -> int:
        """Number of logits so far that were +∞ or NaN; their heads were not scaled. On a GPU, reading it waits for
        the device.
        """
        return int(self._nonfinite)

    def check(self, params: Sequence[ParamRecord], qk_logits: Mapping[LayerKey, Tensor] | None) -> None:
        """Raises ConfigError for logits that cannot be applied. Writes nothing and does not communicate."""
        if qk_logits is None:
            return
        if self._config is None:
            raise ConfigError(
                "qk_logits were passed to step(), but the optimizer has no clip_config. Write Muon(groups, "
                'clip_config={"head_dim": 128, "threshold": 100}), or leave qk_logits out.'
            )
        check_logits(qk_logits)
        config, qk_logits = self._config, ordered(qk_logits)
        if not qk_logits:
            raise ConfigError(
                "qk_logits is empty, so nothing would be clipped. If it comes from MaxLogits.collect(), no forward "
                "has run inside collecting(). For a step without clipping pass None."
            )
        if params is not self._records:
            self._records, self._projections, self._key = params, find_projections(params, config), None
        key = (
            tuple((layer, logits.numel()) for layer, logits in qk_logits.items()),
            tuple((one.record.param.requires_grad, one.record.param_group["split"]) for one in self._projections),
        )
        if key == self._key:
            return
        heads = HeadTable()
        for layer, logits in qk_logits.items():
            heads.add_layer(layer, logits.numel(), self._projections, config)
        self._buckets = _build_buckets(heads, params)
        self.clipped = frozenset(index for bucket in self._buckets for index in bucket.members)
        self._key = key

    @torch.no_grad()
    def apply(
        self,
        params: Sequence[ParamRecord],
        qk_logits: Mapping[LayerKey, Tensor] | None,
        skip_mask: Tensor | None = None,
    ) -> None:
        """Scales the rows of all heads whose logit exceeds the threshold, unless ``skip_mask`` is true.

        Args:
            params: all parameters of the optimizer, already updated.
            qk_logits: layer → largest logit of each head, the same on all ranks that hold the layer. None does nothing.
            skip_mask: a boolean tensor without dims, on a device.
        """
        if qk_logits is None:
            return
        self.check(params, qk_logits)
        qk_logits = ordered(qk_logits)
        assert self._config is not None
        with profiler_range("meshmuon::qk_clip"):
            logits = whole_logits(qk_logits)
            for k, bucket in enumerate(self._buckets):
                joined = torch.cat([copy_to(of_layer, bucket.slots.device).to(bucket.dtype) for of_layer in logits])
                rows = torch.split(_row_factors(bucket, joined, self._config.threshold, skip_mask), bucket.sizes)
                for member, factor in zip(bucket.members, rows, strict=True):
                    local = local_part(params[member].param)
                    if local.numel():
                        local.mul_(factor.view(-1, *[1] * (local.dim() - 1)))
                if k == 0:  # every bucket has the same logits
                    self._nonfinite = self._nonfinite + (joined.isnan() | joined.isposinf()).sum()


def _build_buckets(heads: HeadTable, params: Sequence[ParamRecord]) -> list[_Bucket]:
    """All index tensors, on the devices where they are used."""
    slots_by_bucket: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for index, slots in heads.slots.items():
        param = params[index].param
        if param.requires_grad:
            dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            slots_by_bucket.setdefault((param.device, dtype), {})[index] = slots[_local_rows(params[index])]
    return [
        _Bucket(
            members=tuple(members),
            sizes=[slots.numel() for slots in members.values()],
            heads_of_logits=torch.tensor(heads.of_logits["q"] + heads.of_logits["k"]).to(device),
            head_count=heads.count,
            slots=torch.cat(list(members.values())).to(device),
            dtype=dtype,
        )
        for (device, dtype), members in slots_by_bucket.items()
    ]


def _local_rows(record: ParamRecord) -> Tensor:
    """The global row number of each row of the local tensor."""
    name, held = record.name, held_ranges(record.param)
    if not math.prod(record.local_shape):
        return torch.zeros(0, dtype=torch.long)
    if tuple(map(length, held)) != record.local_shape:
        raise PlanError(
            f"{name} is on {layout_text(name, record.param)}, but this rank holds {record.local_shape}: its shards "
            "are not what its placements say."
        )
    return torch.cat([torch.arange(start, stop) for start, stop in held[0]])


def _row_factors(bucket: _Bucket, logits: Tensor, threshold: float, skip_mask: Tensor | None) -> Tensor:
    """The factor of each row of the bucket's local tensors."""
    none = logits.new_full((bucket.head_count,), -math.inf)
    largest = none.scatter_reduce(0, bucket.heads_of_logits, logits.repeat(2), "amax")
    # Clamp before dividing: logits that are small, negative or −∞ give exactly 1.
    gamma = torch.full_like(largest, threshold) / largest.clamp(min=threshold)
    # A logit of +∞ gives γ = 0 and NaN gives NaN. Neither says by how much to scale, and both would destroy the head.
    usable = gamma > 0
    if skip_mask is not None:
        usable = usable & ~copy_to(skip_mask, gamma.device)
    gamma = torch.where(usable, gamma, 1.0)
    factors = torch.cat([torch.ones_like(gamma[:1]), torch.stack([gamma.sqrt(), gamma], 1).flatten()])
    return factors[bucket.slots]
