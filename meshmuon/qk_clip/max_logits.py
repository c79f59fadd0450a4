"""MaxLogits: collects the largest attention logit of every head, for QK-clip."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..device import copy_to, known_to_host
from ..errors import ConfigError
from ..params.dtensors import ReplicaGroup, as_dtensor
from ..torch_compat import has_compiled, never_traced, split_factor, unwrapped, without_modes
from ..transport import norm_device, turn_of
from ..transport.collectives import all_gather_objects, reduce_largest
from .logit_maxima import DEFAULT_BLOCK_BYTES, head_maxima
from .logits import nan_as_infinity, process_group_of, ranks_of
from .projections import LayerKey

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

_HeadCounts: TypeAlias = "dict[LayerKey, list[int]]"
"""The number of heads of each layer on each of the tensor parallel ranks."""

_lock = threading.Lock()
_threads_inside = 0  # threads that are inside ``_uncompiled()``
_stance: AbstractContextManager[Any] | None = None  # the stance that the first of them has set


class MaxLogits:
    """Collects the largest logit (q·k)·scale of each query head since the last ``collect``.

    Attach modules that call ``F.scaled_dot_product_attention``; call ``observe`` in hand-written attention. Outside of
    ``with collecting()`` nothing is observed and nothing costs time. ``collect`` takes the maximum over all ranks in
    one all-reduce and returns what ``Muon.step(qk_logits=...)`` takes::

        logits = MaxLogits()
        for layer, block in enumerate(model.layers):
            logits.attach(block.attention, layer)
        with logits.collecting():
            loss = model(tokens)  # one or more forwards
        loss.backward()
        optimizer.step(qk_logits=logits.collect())

    Args:
        group: the ranks that hold the same layers and see other data or other heads (data, context and tensor parallel
            ranks together, never pipeline stages), as a process group or a mesh. Required if there is more than one
            rank.
        tp_group: the tensor parallel ranks that divide the heads of a layer, in order, as a process group or a mesh of
            one axis. The same all-reduce then assembles the logits of all heads.
        block_bytes: approximate limit of the memory that logits take at a time.
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
        group = tp_group if group is None else group
        self._process_group = None if group is None else process_group_of(group)
        self._tp_ranks = (0,) if tp_group is None else ranks_of(tp_group)
        if tp_group is not None and self._process_group is not None:
            missing = sorted(set(self._tp_ranks) - set(dist.get_process_group_ranks(self._process_group)))
            if missing:
                raise ConfigError(
                    f"MaxLogits: tp_group has the ranks {self._tp_ranks}, of which group lacks {missing}: pass a "
                    "group of all data and tensor parallel ranks that hold the same layers."
                )
        self._attached: list[tuple[nn.Module, LayerKey]] = []
        self._maxima: dict[LayerKey, Tensor] = {}  # this rank's largest logits since the last collect()
        self._observed: set[LayerKey] = set()  # layers that the forward of an attached module has observed
        self._collecting = False
        self._head_counts: _HeadCounts | None = None  # as the ranks have agreed

    def attach(self, module: nn.Module, layer: LayerKey) -> None:
        """Observes a module's calls of ``F.scaled_dot_product_attention`` while collecting.

        Args:
            module: the module whose forward makes the call, directly or through its submodules.
            layer: the key of the layer in ``qk_logits``: its number, or its name.
        """
        if not isinstance(layer, (int, str)) or isinstance(layer, bool):
            raise ConfigError(f"MaxLogits: the layer {layer!r} must be a number or a name.")
        if self._collecting:
            raise ConfigError("MaxLogits: attach modules before collecting, not during it.")
        self._attached.append((unwrapped(module), layer))

    def detach(self) -> None:
        """Removes all attached modules and discards all observations."""
        if self._collecting:
            raise ConfigError("MaxLogits: detach modules after collecting, not during it.")
        self._attached.clear()
        self._maxima.clear()
        self._head_counts = None

    @contextmanager
    def collecting(self, *, eager: bool = True) -> Iterator[None]:
        """Observes forwards inside the ``with``. Until ``collect``, maxima are taken over all of them.

        Args:
            eager: run compiled modules eagerly, since calls inside compiled code cannot be observed. With False,
                compiled code stays compiled and must call ``observe`` or ``observe_scores`` itself.
        """
        if not eager and self._attached:
            raise ConfigError(
                "MaxLogits: attached modules are observed in eager mode only. With collecting(eager=False) attach "
                "none, and call observe() or observe_scores() in the attention instead."
            )
        if self._collecting:
            raise ConfigError("MaxLogits: collecting() was entered already: leave it before entering it again.")
        with ExitStack() as stack:
            if eager:
                stack.enter_context(_uncompiled())
            for module, layer in self._attached:
                stack.enter_context(self._observing_forward(module, layer))
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
        """Observes the logits of hand-written attention. Does nothing unless collecting.

        Args:
            layer: the key of the layer in ``qk_logits``.
            q: queries, (batch, heads, positions, dim), as they enter the product: after rotary embeddings and norms.
            k: keys, (batch, key heads, positions, dim).
            causal: whether query t sees only keys 0 to t.
            scale: factor of the logits, 1/√dim unless given.
            mask: as SDPA's ``attn_mask``. Numbers of −10000 or less hide a key; others are ignored.
        """
        if self._collecting:
            options = {"causal": causal, "scale": scale, "block_bytes": self._block_bytes}
            self._record(layer, _maxima_of_logits, q, k, mask, **options)

    def observe_scores(self, layer: LayerKey, scores: Tensor) -> None:
        """Observes the scores of attention that reports them: ``flex_attention(...,
        return_aux=AuxRequest(max_scores=True))``.

        Does nothing unless collecting.

        Args:
            layer: the key of the layer in ``qk_logits``.
            scores: largest score of each query, (batch, heads, positions).
        """
        if self._collecting:
            self._record(layer, _maxima_of_scores, scores)

    @torch.no_grad()
    def collect(self) -> dict[LayerKey, Tensor]:
        """Returns the largest logit of each head of every layer, over all ranks of the group, and starts over.

        Every rank of the group must call it. At the first call the ranks tell each other which layers and heads they
        have observed. From then on a call is one all-reduce, and the host does not wait for a device. If layers or
        heads change, ranks whose tensors are in host memory compare again; on other devices they must not change.

        Returns:
            Layer → float32 tensor of one number per head: −∞ for a head that was not observed, +∞ where a logit was NaN
            or +∞ (QK-clip does not scale such a head).
        """
        if self._process_group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "MaxLogits: there are several ranks, and each has seen other data or heads. Write "
                "MaxLogits(group=...) with the process group or mesh of all ranks that hold the same layers: data, "
                "context and tensor parallel ranks."
            )
        try:
            if self._process_group is None:
                return {layer: nan_as_infinity(value) for layer, value in self._maxima.items()}
            with turn_of(self._process_group):
                return self._reduced(self._process_group)
        finally:
            self._maxima = {}

    def _reduced(self, process_group: dist.ProcessGroup) -> dict[LayerKey, Tensor]:
        """The maxima over all ranks, from one vector of all heads of all layers and a flag that asks to compare
        heads again.
        """
        tp_size, maxima = len(self._tp_ranks), self._maxima
        tp_rank = self._tp_ranks.index(dist.get_rank()) if tp_size > 1 else 0
        if self._head_counts is None:
            own = {layer: value.numel() for layer, value in maxima.items()}
            observed = all_gather_objects((tp_rank, tp_size, own), process_group, phase="agreement on attention layers")
            self._head_counts = _agreed_head_counts(observed)
        counts = self._head_counts
        changed = any(layer not in counts or value.numel() != counts[layer][tp_rank] for layer, value in maxima.items())
        device = norm_device([value.device for value in maxima.values()], [process_group])
        sizes = list(map(sum, counts.values()))
        packed = torch.full((sum(sizes) + 1,), -math.inf, device=device)
        *layers, flag = torch.split(packed, [*sizes, 1])
        flag.fill_(changed)  # not another length, since all ranks must reduce vectors of one length
        for (layer, heads), of_layer in zip(counts.items(), layers, strict=True):
            if layer in maxima and not changed:
                torch.split(of_layer, heads)[tp_rank].copy_(copy_to(nan_as_infinity(maxima[layer]), device))
        reduce_largest(packed, process_group)
        if known_to_host(flag) and bool(flag > 0):  # all ranks see it
            self._head_counts = None
            return self._reduced(process_group)
        if changed:
            raise ConfigError(
                "MaxLogits: the layers or heads that this rank has observed are not those of the first collect(), and "
                "the other ranks could only notice by waiting for their devices. Create a new MaxLogits after "
                "changing the model."
            )
        # The host may not know that another rank has raised. Infinite logits then keep this rank from scaling anything.
        values = torch.where(flag > 0, math.inf, packed[:-1])
        return dict(zip(counts, torch.split(values, sizes), strict=True))

    @contextmanager
    def _observing_forward(self, module: nn.Module, layer: LayerKey) -> Iterator[None]:
        """Replaces the module's forward meanwhile. Unlike a pair of hooks, it also ends if the forward raises."""
        forward: Callable[..., Any] = module.forward
        replaced = "forward" in module.__dict__

        @wraps(forward)
        def observed(*args: Any, **kwargs: Any) -> Any:
            self._observed.discard(layer)
            with _SDPAObserver(self, layer):
                result = forward(*args, **kwargs)
            if layer not in self._observed:
                raise ConfigError(
                    f"MaxLogits: {type(module).__name__} of layer {layer!r} never called "
                    "F.scaled_dot_product_attention, so its logits were not observed. Attach the module that calls "
                    "it, or call observe() or observe_scores() in it."
                )
            return result

        module.forward = observed
        try:
            yield
        finally:
            if replaced:
                module.forward = forward
            else:
                del module.__dict__["forward"]

    @never_traced
    @torch.no_grad()
    def _record(self, layer: LayerKey, measure: Callable[..., Tensor], *args: Any, **options: Any) -> None:
        """Keeps the larger of the maxima that are known and those that ``measure`` finds.

        Autograd, compilers and dispatch modes see nothing of it. Selective activation checkpointing is such a mode:
        results that it caches here in the forward pass would be handed to the model's own operations in the
        recomputation.
        """
        with without_modes():
            maxima = measure(layer, *args, **options).to(torch.float32)
            known = self._maxima.get(layer)
            if known is not None:
                if known.shape != maxima.shape:
                    raise ConfigError(
                        f"MaxLogits: layer {layer!r} had {known.numel()} heads and now has {maxima.numel()}."
                    )
                maxima = torch.maximum(known, maxima.to(known.device))
            self._observed.add(layer)
            self._maxima[layer] = maxima


class _SDPAObserver(TorchFunctionMode):
    """Observes every call of SDPA while it is entered."""

    def __init__(self, logits: MaxLogits, layer: LayerKey) -> None:
        super().__init__()
        self._logits, self._layer = logits, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            arguments = {**dict(zip(_SDPA, args, strict=False)), **(kwargs or {})}
            self._logits.observe(
                self._layer,
                arguments["query"],
                arguments["key"],
                causal=bool(arguments.get("is_causal", False)),
                scale=arguments.get("scale"),
                mask=arguments.get("attn_mask"),
            )
        return result


def _maxima_of_logits(layer: LayerKey, q: Tensor, k: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """``head_maxima``. Of DTensors this rank's part is measured, which must have all positions of its heads and
    sequences.
    """
    sharded, keys, masks = as_dtensor(q), as_dtensor(k), None if mask is None else as_dtensor(mask)
    if sharded is None and keys is None and masks is None:
        return head_maxima(q, k, mask=mask, **options)
    if (
        sharded is None
        or keys is None
        or sharded.placements != keys.placements
        or sharded.device_mesh != keys.device_mesh
    ):
        raise ConfigError(f"MaxLogits: q and k of layer {layer!r} are laid out differently: redistribute k like q.")
    from torch.distributed.tensor import Shard

    by_heads = all(
        placement.is_replicate()
        or (isinstance(placement, Shard) and split_factor(placement) is None and placement.dim < q.dim() - 2)
        for placement in sharded.placements
    )
    if not by_heads or (masks is not None and not all(placement.is_replicate() for placement in masks.placements)):
        raise ConfigError(
            f"MaxLogits: layer {layer!r} has q on {sharded.placements}. Logits need queries and keys of all "
            "positions, and a replicated mask: shard by batch and heads only, or call observe() with gathered keys."
        )
    return head_maxima(sharded.to_local(), keys.to_local(), mask=mask if masks is None else masks.to_local(), **options)


def _maxima_of_scores(layer: LayerKey, scores: Tensor) -> Tensor:
    """The largest of the scores, (..., heads, queries), of each head."""
    if as_dtensor(scores) is not None:
        raise ConfigError(
            f"MaxLogits: the scores of layer {layer!r} are a DTensor: pass scores.to_local(), sharded by heads."
        )
    if scores.dim() < 2:
        raise ConfigError(
            f"MaxLogits: scores of layer {layer!r} have shape {tuple(scores.shape)}, not (batch, heads, queries)."
        )
    return scores.amax([dim for dim in range(scores.dim()) if dim != scores.dim() - 2])


def _agreed_head_counts(observed: Mapping[int, tuple[int, int, Mapping[LayerKey, int]]]) -> _HeadCounts:
    """The heads of each layer, in the same order on all ranks.

    ``observed`` is what each rank has told: its place among the tensor parallel ranks, their number, and its heads of
    each layer.
    """
    counts: dict[LayerKey, dict[int, int]] = {}  # by layer and position among the tensor parallel ranks
    for rank, (position, _, heads_of_rank) in observed.items():
        for layer, heads in heads_of_rank.items():
            known = counts.setdefault(layer, {}).setdefault(position, heads)
            if known != heads:
                raise ConfigError(
                    f"MaxLogits: layer {layer!r} has {heads} heads on rank {rank} and {known} on another rank at the "
                    "same position of its tp_group."
                )
    if not counts:
        raise ConfigError(
            "MaxLogits: no rank has observed anything: run a forward inside collecting() before collect()."
        )
    tp_size, *others = sorted({tp_size for _, tp_size, _ in observed.values()})
    if others:
        raise ConfigError(f"MaxLogits: ranks have tp_groups of different sizes: {[tp_size, *others]}.")
    for layer, by_position in counts.items():
        if len(by_position) < tp_size:
            raise ConfigError(
                f"MaxLogits: only {sorted(by_position)} of {tp_size} tensor parallel ranks have observed layer "
                f"{layer!r}."
            )
    return {layer: [by_position[position] for position in range(tp_size)] for layer, by_position in counts.items()}


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Runs compiled code eagerly inside the ``with``. Does not load torch.compile if nothing was compiled.

    The stance is global to the process: the first thread that enters sets it, and the last one that leaves resets it.
    """
    global _threads_inside, _stance
    with _lock:
        _threads_inside += 1
        if _stance is None and has_compiled():
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
    try:
        yield
    finally:
        with _lock:
            _threads_inside -= 1
            if _threads_inside == 0 and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None
