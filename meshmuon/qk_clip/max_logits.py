"""MaxLogits: collects the largest attention logit of every head, for QK-clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..device import known_to_host
from ..errors import ConfigError
from ..params.dtensors import ReplicaGroup, as_dtensor, groups_of
from ..torch_compat import split_factor, unwrapped
from ..transport import norm_device, shared_group
from ..transport.maxima import everyone_on_host, reduce_largest
from .logit_maxima import DEFAULT_BLOCK_BYTES, head_maxima
from .names import LayerKey
from .untraced import uncompiled, unseen

__all__ = ["MaxLogits"]

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class _Note(NamedTuple):
    """What a rank tells the others before the first reduction."""

    place: int  # its place among the ranks that divide heads
    places: int
    heads: tuple[tuple[LayerKey, int], ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a layer is in the packed vector: all heads, and those of this rank."""

    start: int
    stop: int
    mine: slice


class MaxLogits:
    """The largest logits (q·k)·scale per query head that attention has seen since the last ``collect``.

    Attention modules that call ``F.scaled_dot_product_attention`` are attached; hand-written attention calls ``observe``. Nothing
    is watched, and nothing costs anything, outside ``with collecting()``. ``collect`` takes the largest over all ranks by one
    all-reduce and returns what ``Muon.step(qk_logits=...)`` takes::

        logits = MaxLogits()
        for layer, block in enumerate(model.layers):
            logits.attach(block.attention, layer)
        with logits.collecting():
            loss = model(tokens)  # as many forwards as wanted
        loss.backward()
        optimizer.step(qk_logits=logits.collect())

    Args:
        group: the ranks that hold the same layers and see other data or other heads (data, context and tensor parallel ranks
            together, never pipeline stages), as a process group or a mesh. Needed as soon as there is more than one rank.
        tp_group: the ranks among which the heads of a layer are divided, in order, as a process group or a mesh of one axis.
            Logits of all heads are then put together by the same all-reduce.
        block_bytes: about the most memory that logits take at a time while their largest is found.
    """

    def __init__(
        self,
        group: ReplicaGroup | None = None,
        *,
        tp_group: ReplicaGroup | None = None,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
    ) -> None:
        if not isinstance(block_bytes, int) or block_bytes < 1:
            raise ConfigError(f"MaxLogits: block_bytes={block_bytes!r} must be a positive number of bytes.")
        self._block_bytes = block_bytes
        self._group = _group_of(group if group is not None else tp_group)
        self._heads_ranks = (0,) if tp_group is None else _ranks_of(tp_group)
        if tp_group is not None and self._group is not None:
            missing = sorted(set(self._heads_ranks) - set(dist.get_process_group_ranks(self._group)))
            if missing:
                raise ConfigError(
                    f"MaxLogits: tp_group has the ranks {self._heads_ranks}, of which group lacks {missing}: give a group of all "
                    "data and tensor parallel ranks that hold the same layers."
                )
        self._attached: list[tuple[nn.Module, LayerKey]] = []
        self._maxima: dict[LayerKey, Tensor] = {}
        self._observed: dict[LayerKey, int] = {}
        self._collecting = False
        self._spans: dict[LayerKey, _Span] | None = None

    def attach(self, module: nn.Module, layer: LayerKey) -> None:
        """Watches an attention module's calls of ``F.scaled_dot_product_attention``, while collecting.

        Args:
            module: the module whose forward makes the call, itself or through others.
            layer: what ``qk_logits`` shall call it: its number, or its name.
        """
        if not isinstance(layer, (int, str)) or isinstance(layer, bool):
            raise ConfigError(f"MaxLogits: the layer {layer!r} must be a number or a name.")
        if self._collecting:
            raise ConfigError("MaxLogits: attach modules before collecting, not during it.")
        self._attached.append((unwrapped(module), layer))

    def detach(self) -> None:
        """Forgets all attached modules and everything observed so far."""
        if self._collecting:
            raise ConfigError("MaxLogits: detach modules after collecting, not during it.")
        self._attached.clear()
        self._maxima.clear()
        self._spans = None

    @contextmanager
    def collecting(self, *, eager: bool = True) -> Iterator[None]:
        """Watches forwards inside the ``with``; maxima add up over several of them until ``collect``.

        Args:
            eager: run what ``torch.compile`` has compiled as it is written, since a compiled module cannot be watched. With False
                compiled code stays compiled, and must call ``observe`` or ``observe_scores`` itself.
        """
        if not eager and self._attached:
            raise ConfigError(
                "MaxLogits: attached modules are watched in eager mode only. With collecting(eager=False) attach none, and call "
                "observe() or observe_scores() in the attention instead."
            )
        if self._collecting:
            raise ConfigError("MaxLogits: collecting() is entered already.")
        with ExitStack() as stack:
            if eager:
                stack.enter_context(uncompiled())
            for module, layer in self._attached:
                stack.enter_context(self._watched(module, layer))
            self._collecting = True
            try:
                yield
            finally:
                self._collecting = False

    def observe(
        self,
        layer: LayerKey,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """For hand-written attention: takes the largest logit of each head of ``q``; does nothing unless collecting.

        Args:
            layer: what ``qk_logits`` shall call it.
            q: queries, (batch, heads, positions, dim), as they enter the product: after rotary embeddings and norms.
            k: keys, (batch, key heads, positions, dim).
            causal: whether query t sees keys 0 to t only.
            scale: factor of the logits, 1/√dim unless given.
            mask: as SDPA's ``attn_mask``; numbers of −10000 or less hide a key, others are no part of a logit.
        """
        if self._collecting:
            self._observe(layer, q, k, causal, scale, mask)

    def observe_scores(self, layer: LayerKey, scores: Tensor) -> None:
        """For attention that knows its largest scores: ``flex_attention(..., return_aux=AuxRequest(max_scores=True))``.

        Does nothing unless collecting.

        Args:
            layer: what ``qk_logits`` shall call it.
            scores: largest score of each query, (batch, heads, positions).
        """
        if self._collecting:
            self._observe_scores(layer, scores)

    @torch.no_grad()
    def collect(self) -> dict[LayerKey, Tensor]:
        """The largest logits per head of every layer, over all ranks of the group, and starts anew.

        Every rank of the group must call. The first call compares notes on layers and heads. As long as they stay what they were
        it is one all-reduce from then on, and the host does not wait for a device; on devices they must stay.

        Returns:
            Layer → float32 tensor of one number per head: −∞ for a head that nothing was seen of, +∞ where a logit was NaN or +∞
            (QK-clip leaves such a head alone).
        """
        if self._group is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise ConfigError(
                    "MaxLogits: there are several ranks, and each has seen other data or heads. Write MaxLogits(group=...) with "
                    "the group or mesh of all ranks that hold the same layers: data, context and tensor parallel ones."
                )
            found = {layer: _without_nan(value) for layer, value in self._maxima.items()}
            self._maxima = {}
            return found
        try:
            return self._reduced(self._group)
        finally:
            self._maxima = {}

    def _reduced(self, group: dist.ProcessGroup) -> dict[LayerKey, Tensor]:
        if self._spans is None:
            note = _Note(*_place(self._heads_ranks), tuple((layer, one.numel()) for layer, one in self._maxima.items()))
            notes = everyone_on_host(note, group)
            self._spans = _spans(notes, note.place)
        spans = self._spans
        changed = any(
            layer not in spans or value.numel() != spans[layer].mine.stop - spans[layer].mine.start
            for layer, value in self._maxima.items()
        )
        total = max(span.stop for span in spans.values())
        device = norm_device([value.device for value in self._maxima.values()], [group])
        packed = torch.full((total + 1,), -math.inf, device=device)
        packed[total] = float(changed)  # the length never changes, so that ranks that differ still meet
        if not changed:
            for layer, value in self._maxima.items():
                packed[spans[layer].mine] = _without_nan(value).to(device, non_blocking=device.type != "cpu")
        reduce_largest(packed, group)
        if known_to_host(packed) and bool(packed[total] > 0):  # all ranks see it, and compare notes again
            self._spans = None
            return self._reduced(group)
        if changed:
            raise ConfigError(
                "MaxLogits: the layers or heads that this rank has observed are not those of the first collect(), and the other "
                "ranks cannot hear of it without waiting for their devices. Make a new MaxLogits after changing the model."
            )
        # Where the host cannot know that another rank has raised, its logits at least scale nothing.
        values = torch.where(packed[total] > 0, math.inf, packed[:total])
        return {layer: values[span.start : span.stop] for layer, span in spans.items()}

    @contextmanager
    def _watched(self, module: nn.Module, layer: LayerKey) -> Iterator[None]:
        """Replaces the module's forward for a while: unlike a pair of hooks it cannot be left half done by an exception."""
        forward: Callable[..., Any] = module.forward
        replaced = "forward" in module.__dict__

        @wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = self._observed.get(layer, 0)
            with _Watch(self, layer):
                result = forward(*args, **kwargs)
            if self._observed.get(layer, 0) == before:
                raise ConfigError(
                    f"MaxLogits: {type(module).__name__} of layer {layer!r} never called F.scaled_dot_product_attention, so that "
                    "its logits were not seen. Attach the module that calls it, or call observe() or observe_scores() in it."
                )
            return result

        module.forward = watched
        try:
            yield
        finally:
            if replaced:
                module.forward = forward
            else:
                del module.__dict__["forward"]

    @unseen
    def _observe(self, layer: LayerKey, q: Tensor, k: Tensor, causal: bool, scale: float | None, mask: Tensor | None) -> None:
        q, k, mask = _own_parts(layer, q, k, mask)
        self._keep(layer, head_maxima(q, k, causal=causal, scale=scale, mask=mask, block_bytes=self._block_bytes))

    @unseen
    def _observe_scores(self, layer: LayerKey, scores: Tensor) -> None:
        if as_dtensor(scores) is not None:
            raise ConfigError(f"MaxLogits: the scores of layer {layer!r} are a DTensor: pass scores.to_local(), by heads.")
        if scores.dim() < 2:
            raise ConfigError(
                f"MaxLogits: scores of layer {layer!r} have shape {tuple(scores.shape)}, not (batch, heads, queries)."
            )
        rest = [dim for dim in range(scores.dim()) if dim != scores.dim() - 2]
        self._keep(layer, scores.detach().amax(rest))

    def _keep(self, layer: LayerKey, found: Tensor) -> None:
        self._observed[layer] = self._observed.get(layer, 0) + 1
        known = self._maxima.get(layer)
        found = found.to(torch.float32)
        if known is not None:
            if known.shape != found.shape:
                raise ConfigError(f"MaxLogits: layer {layer!r} had {known.numel()} heads and now has {found.numel()}.")
            found = torch.maximum(known, found.to(known.device))
        self._maxima[layer] = found


class _Watch(TorchFunctionMode):
    """Sees every call of SDPA while it is entered."""

    def __init__(self, owner: MaxLogits, layer: LayerKey) -> None:
        super().__init__()
        self._owner, self._layer = owner, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            given = {**dict(zip(_SDPA, args, strict=False)), **(kwargs or {})}
            self._owner.observe(
                self._layer,
                given["query"],
                given["key"],
                causal=bool(given.get("is_causal", False)),
                scale=given.get("scale"),
                mask=given.get("attn_mask"),
            )
        return result


def _without_nan(value: Tensor) -> Tensor:
    """NaN as +∞, which a maximum over ranks keeps."""
    return torch.where(value.isnan(), math.inf, value)


def _own_parts(layer: LayerKey, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Plain tensors: this rank's heads and sequences of DTensors that are divided by nothing else."""
    sharded, keys, masks = as_dtensor(q), as_dtensor(k), None if mask is None else as_dtensor(mask)
    if sharded is None and keys is None and masks is None:
        return q.detach(), k.detach(), mask
    if sharded is None or keys is None or sharded.placements != keys.placements or sharded.device_mesh != keys.device_mesh:
        raise ConfigError(f"MaxLogits: q and k of layer {layer!r} are laid out differently: redistribute k like q.")
    from torch.distributed.tensor import Shard

    by_heads = all(
        one.is_replicate() or (isinstance(one, Shard) and split_factor(one) is None and one.dim < q.dim() - 2)
        for one in sharded.placements
    )
    if not by_heads or (masks is not None and not all(one.is_replicate() for one in masks.placements)):
        raise ConfigError(
            f"MaxLogits: layer {layer!r} has q on {sharded.placements}. Logits need queries and keys of all positions, and a "
            "mask that is not divided: divide by batch and heads only, or call observe() with gathered keys."
        )
    return sharded.to_local(), keys.to_local(), mask if masks is None else masks.to_local()


def _group_of(place: ReplicaGroup | None) -> dist.ProcessGroup | None:
    """One process group of all ranks of ``place``."""
    if place is None or isinstance(place, dist.ProcessGroup):
        return place
    return shared_group(_ranks_of(place), groups_of(place))


def _ranks_of(place: ReplicaGroup) -> tuple[int, ...]:
    if isinstance(place, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(place))
    return tuple(sorted(place.mesh.flatten().tolist()))


def _place(ranks: tuple[int, ...]) -> tuple[int, int]:
    return (ranks.index(dist.get_rank()), len(ranks)) if len(ranks) > 1 else (0, 1)


def _spans(notes: dict[int, object], place: int) -> dict[LayerKey, _Span]:
    """Where each layer's heads are in the packed vector, from what all ranks have said; the same on all of them."""
    counts: dict[LayerKey, dict[int, int]] = {}
    places = set()
    for rank, note in notes.items():
        assert isinstance(note, _Note)
        places.add(note.places)
        for layer, heads in note.heads:
            known = counts.setdefault(layer, {}).setdefault(note.place, heads)
            if known != heads:
                raise ConfigError(f"MaxLogits: layer {layer!r} has {heads} heads on rank {rank} and {known} on another like it.")
    if not counts:
        raise ConfigError("MaxLogits: no rank has observed anything: run a forward inside collecting() before collect().")
    if len(places) > 1:
        raise ConfigError(f"MaxLogits: ranks have tp_groups of different sizes: {sorted(places)}.")
    spans, start = {}, 0
    for layer, found in counts.items():
        if set(found) != set(range(max(places))):
            raise ConfigError(
                f"MaxLogits: layer {layer!r} was observed by the tensor parallel ranks {sorted(found)} only, of {max(places)}."
            )
        before = sum(found[k] for k in range(place))
        total = sum(found.values())
        spans[layer] = _Span(start, start + total, slice(start + before, start + before + found[place]))
        start += total
    return spans
