"""All optimizers that step the same weights: meshmuon, torch, packages from PyPI, plain Muon and AdamW; and the models
whose weights these are.

Before the timing starts, the update that each made is computed from its weights and compared with meshmuon's. All whose
scheme is ``keller`` take Keller Jordan's coefficients and five steps, and make the same update. The others make another
one, which is never called the same: how far from orthogonal each ends is measured instead.

Contenders scale the update and the weight decay differently, which the comparison undoes. Some keep momentum as a sum
and others as a running mean; orthogonalisation removes that difference.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.optim._muon as torch_muon
from common import KELLER, Step, float32_newton_schulz, worst_error
from torch import Tensor, nn

from meshmuon import Muon
from meshmuon.ortho import SchemeName

LR, MOMENTUM, DECAY, EPS, STEPS = 1e-3, 0.95, 0.1, 1e-7, 5
FP32, BF16 = "fp32", "bf16"
# Of the update, relative to its largest entry. In float32 the loops are within 1e-4 of float64, but torch's norm of
# 8192 × 2048 entries, by which most contenders divide, is already off by 6.5e-4.
TOLERANCE = {FP32: 3e-3, BF16: 0.1}
OURS = "meshmuon"
SAME: SchemeName = "keller"  # the scheme of all that make the same update
FLOOR = "torch.optim.AdamW, fused"

Make = Callable[[list[nn.Parameter]], Callable[[], object]]


Shape = tuple[int, ...]


def gpt_matrices(layers: int, width: int) -> list[tuple[int, int]]:
    per_layer = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    return per_layer * layers


@dataclass(frozen=True, slots=True)
class Model:
    """Weights that Muon steps.

    Attributes:
        name: of the model.
        about: what was taken of it.
        shapes: of the parameters; three dims are a stack of experts, four a convolution filter.
        count: matrices of the whole model, for the host time.
        costly: whether a step takes seconds; then only the contenders that may be the fastest take part.
    """

    name: str
    about: str
    shapes: tuple[Shape, ...]
    count: int
    costly: bool = False

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix, for contenders that take nothing but matrices."""
        matrices: list[tuple[int, int]] = []
        for shape in self.shapes:
            experts, matrix = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
            matrices += [(matrix[0], math.prod(matrix[1:]))] * experts
        return matrices


def _vit(width: int, stem: tuple[int, ...], blocks: int) -> tuple[Shape, ...]:
    channels = (3, *stem)
    convolutions = [(after, before, 3, 3) for before, after in zip(channels, stem, strict=False)]
    return (*convolutions, (width, stem[-1], 4, 4), *gpt_matrices(blocks, width))


MODELS = (
    Model("GPT-2 small", "1 of 12 layers, width 768", tuple(gpt_matrices(1, 768)), 72),
    Model(
        "Llama-like 1B",
        "q, k, v, o and one of three MLP matrices of one of 16 layers, width 2048",
        ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048)),
        112,
        costly=True,
    ),
    Model("MoE", "64 experts of 512×256 in one parameter", ((64, 512, 256),), 64),
    Model("ViT", "convolution stem, patches of 4×4, 3 of 12 blocks, width 384", _vit(384, (64, 128, 256), 3), 76),
)

QUICK_MODELS = (
    Model("GPT", "1 layer, width 64", tuple(gpt_matrices(1, 64)), 12),
    Model("MoE", "6 experts of 32×16 in one parameter", ((6, 32, 16),), 6),
    Model("ViT", "convolution stem, 1 block, width 48", _vit(48, (8, 16), 1), 9),
)


@dataclass(frozen=True, slots=True)
class Contender:
    """An implementation of an optimizer step.

    Attributes:
        name: in tables.
        make: takes the weights and returns the step.
        dtype: of its products.
        scheme: what orthogonalises; all that are not ``SAME`` make another update.
        package: the module that it needs, or nothing.
        differs: how it differs from meshmuon, in words.
        whole: takes experts and filters as they are; the others get each matrix as a parameter.
        original: scales by √max(1, rows/cols) and not by 0.2·√max(rows, cols).
        decays_adjusted: multiplies weight decay by the scaled learning rate.
        is_muon: makes Muon's update.
        cheap_only: does not take part where a step takes seconds.
    """

    name: str
    make: Make
    dtype: str = FP32
    scheme: str = SAME
    package: str = ""
    differs: str = ""
    whole: bool = False
    original: bool = False
    decays_adjusted: bool = False
    is_muon: bool = True
    cheap_only: bool = True

    def factor(self, rows: int, cols: int) -> float:
        """What the learning rate is multiplied by."""
        return math.sqrt(max(1.0, rows / cols)) if self.original else 0.2 * math.sqrt(max(rows, cols))

    def update(self, before: Tensor, after: Tensor) -> Tensor:
        """The orthogonalised matrix that led from ``before`` to ``after``."""
        factor = self.factor(*before.shape)
        kept = 1 - LR * DECAY * (factor if self.decays_adjusted else 1)
        return (before * kept - after) / (LR * factor)


def _ours(params: list[nn.Parameter], scheme: SchemeName = SAME) -> Callable[[], object]:
    names = [f"layers.{k}.experts.weight" if p.dim() == 3 else f"layers.{k}.weight" for k, p in enumerate(params)]
    group = {"params": params, "names": names, "use_muon": True, "expert_keys": ["experts"], "conv": "flatten"}
    return Muon([group], lr=LR, weight_decay=DECAY, scheme=scheme, none_grad=False, compute_dtype=torch.float32).step


def torch_shipped(params: list[nn.Parameter]) -> Callable[[], object]:
    return torch.optim.Muon(params, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw").step


def torch_float32(params: list[nn.Parameter]) -> Callable[[], object]:
    return patched(torch_shipped(params), (torch_muon, "_zeropower_via_newtonschulz", float32_newton_schulz))


class PlainMuon:
    """Muon in a few lines: momentum, Newton–Schulz, scale; matrix by matrix, with no buffer reused."""

    def __init__(self, params: list[nn.Parameter], iteration: Callable[[Tensor], Tensor]) -> None:
        self.params, self.iteration = params, iteration
        self.momentum = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for param, momentum in zip(self.params, self.momentum, strict=True):
            grad = param.grad
            assert grad is not None
            momentum.lerp_(grad, 1 - MOMENTUM)
            update = self._orthogonalise(grad.lerp(momentum, MOMENTUM))
            param.mul_(1 - LR * DECAY)
            param.add_(update, alpha=-LR * max(1.0, param.size(0) / param.size(1)) ** 0.5)

    def _orthogonalise(self, update: Tensor) -> Tensor:
        tall = update.size(0) > update.size(1)
        x = update.mT if tall else update
        x = x / (x.norm() + EPS)
        for _ in range(STEPS):
            x = self.iteration(x)
        return x.mT if tall else x


def _keller_iteration(x: Tensor) -> Tensor:
    a, b, c = KELLER
    gram = x @ x.mT
    return a * x + (b * gram + c * (gram @ gram)) @ x


def _plain(params: list[nn.Parameter], iteration: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    return PlainMuon(params, iteration).step


def patched(step: Callable[[], object], *patches: tuple[Any, str, Any], eager: bool = False) -> Callable[[], object]:
    """``step`` with attributes replaced while it runs, and nothing compiled if ``eager``."""

    def run() -> None:
        with ExitStack() as stack:
            for target, name, value in patches:
                stack.enter_context(mock.patch.object(target, name, value))
            if eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            step()

    return run


def _keller_package(params: list[nn.Parameter]) -> Callable[[], object]:
    package: Any = importlib.import_module("muon")
    step = package.SingleDeviceMuon(params, lr=LR, weight_decay=DECAY, momentum=MOMENTUM).step
    return patched(step, (Tensor, "bfloat16", Tensor.float))


def _pytorch_optimizer(params: list[nn.Parameter]) -> Callable[[], object]:
    package: Any = importlib.import_module("pytorch_optimizer")
    base: Any = importlib.import_module("pytorch_optimizer.optimizer.muon.base")
    groups = [{"params": params, "use_muon": True}]
    step = package.Muon(groups, lr=LR, weight_decay=DECAY, use_adjusted_lr=True, ns_method="gram_newton_schulz").step
    name = "zero_power_via_gram_newton_schulz"
    return patched(step, (base, name, partial(getattr(base, name), dtype=torch.float32)))


def _muonium(params: list[nn.Parameter]) -> Callable[[], object]:
    package: Any = importlib.import_module("muonium")
    loops: Any = importlib.import_module("muonium.orthogonalize.orthogonalize")
    options = {"use_cautious_wd": False, "orthogonalization_strategy": "newton_schulz"}
    step = package.Muon(params, lr=LR, wd=DECAY, **options).step
    return patched(step, (loops, "ns_loop_triton", loops.ns_loop), (Tensor, "bfloat16", Tensor.float), eager=True)


def _adamw(params: list[nn.Parameter]) -> Callable[[], object]:
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, betas=(0.9, 0.95), fused=True).step


CONTENDERS = (
    Contender(OURS, _ours, whole=True, cheap_only=False),
    Contender("torch.optim.Muon, fp32", torch_float32, differs="products kept in float32", cheap_only=False),
    Contender("torch.optim.Muon, as shipped", torch_shipped, BF16, differs="products in bfloat16"),
    Contender(
        "Keller Jordan's, plain",
        partial(_plain, iteration=_keller_iteration),
        original=True,
        differs="scale √(rows/cols)",
    ),
    Contender(
        "muon-optimizer, fp32",
        _keller_package,
        package="muon",
        original=True,
        differs="products kept in float32, scale √(rows/cols), overwrites gradients",
    ),
    Contender(
        "pytorch-optimizer Gram, fp32",
        _pytorch_optimizer,
        package="pytorch_optimizer",
        differs="products kept in float32, Gram form with one restart, overwrites gradients",
        cheap_only=False,
    ),
    Contender(
        "muonium, fp32, eager",
        _muonium,
        package="muonium",
        original=True,
        decays_adjusted=True,
        differs="products kept in float32, its torch loop instead of its CUDA kernel, not compiled, decay × scaled lr",
    ),
    *(
        Contender(
            f"meshmuon, {scheme}",
            partial(_ours, scheme=scheme),
            scheme=scheme,
            whole=True,
            cheap_only=False,
            differs=f"scheme {scheme}",
        )
        for scheme in ("polar_express", "auto")
    ),
    Contender(FLOOR, _adamw, differs="another optimizer: the floor", is_muon=False, cheap_only=False),
)


def available(shown: Callable[[str], None]) -> list[Contender]:
    """The contenders that can run here; says which cannot."""
    contenders = []
    for contender in CONTENDERS:
        try:
            if contender.package:
                module = importlib.import_module(contender.package)
                if contender.package == "muon" and not hasattr(module, "SingleDeviceMuon"):
                    raise ImportError("another package is called muon as well")
        except ImportError as error:
            shown(f"{contender.name} is left out: {error}. `pip install 'meshmuon[bench]'` brings it.")
        else:
            contenders.append(contender)
    return sorted(contenders, key=lambda contender: not contender.is_muon)  # the floor comes last


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender with its own copy of the weights and gradients, which are the same for all."""

    contender: Contender
    params: list[nn.Parameter]
    step: Step

    def matrices(self) -> list[Tensor]:
        """Its weights as matrices; views."""
        matrices: list[Tensor] = []
        for param in self.params:
            value = param.detach()
            matrices += value.unbind() if value.dim() == 3 else [value.flatten(1)]
        return matrices


def enter(contender: Contender, model: Model) -> Entrant:
    generator = torch.Generator().manual_seed(0)
    shapes: Sequence[tuple[int, ...]] = model.shapes if contender.whole else model.matrices
    params = [nn.Parameter(torch.randn(shape, generator=generator) / _inputs(shape) ** 0.5) for shape in model.shapes]
    grads = [torch.randn(shape, generator=generator) for shape in model.shapes]
    if not contender.whole:
        params, grads = _apart(params), [grad.detach() for grad in _apart(grads)]
    assert [tuple(p.shape) for p in params] == [tuple(shape) for shape in shapes]

    def fresh_gradients() -> None:
        for param, grad in zip(params, grads, strict=True):
            if param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad.copy_(grad)

    fresh_gradients()
    return Entrant(contender, params, Step(contender.make(params), fresh_gradients))


def _inputs(shape: Sequence[int]) -> int:
    """Inputs of an output; weights larger than usual would drown the update in their own rounding."""
    return math.prod(shape[1:]) if len(shape) == 4 else shape[-1]


def _apart(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    """Each matrix as a parameter with memory of its own."""
    params: list[nn.Parameter] = []
    for tensor in tensors:
        for matrix in tensor.detach().unbind() if tensor.dim() == 3 else [tensor.detach().flatten(1)]:
            params.append(nn.Parameter(matrix.clone()))
    return params


def differences(entrants: Sequence[Entrant]) -> dict[str, float]:
    """Steps each entrant once: how far its update is from the first one's, relative to the first one's largest entry.

    Those with another scheme than ``SAME`` step too, but have no difference.
    """
    before = [matrix.clone() for matrix in entrants[0].matrices()]
    updates: list[Tensor] = []
    apart: dict[str, float] = {}
    for entrant in entrants:
        entrant.step.before()
        entrant.step.run()
        if not entrant.contender.is_muon or entrant.contender.scheme != SAME:
            continue
        now = [entrant.contender.update(b, a) for b, a in zip(before, entrant.matrices(), strict=True)]
        updates = updates or now
        distances = [float((u - v).abs().max() / v.abs().max()) for u, v in zip(now, updates, strict=True)]
        apart[entrant.contender.name] = max(distances)
    return apart


def error_by_svd(contender: Contender, rows: int, cols: int) -> float:
    """The worst error of the contender's own step on rows × cols gradients with adversarial spectra."""

    def update(grad: Tensor) -> Tensor:
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        contender.make([param])()
        return contender.update(torch.zeros_like(grad), param.detach())

    return worst_error(update, rows, cols)
