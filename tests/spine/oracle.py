"""Muon written plainly: one matrix after the other, in float64, from formulas; no ranks, batches or forms.

    M ← momentum·M + G,   U = G + momentum·M with Nesterov, else M,
    p ← p·(1 − lr·weight_decay),   p ← p − lr·factor(outputs, inputs)·rules(orthogonal(rules(U))).

AdamW is ``torch.optim.AdamW``. With a ``Rounding``, every number that an optimizer must store is moved at random by up
to as much as its dtype rounds it, and every product by as much as a sum of so many terms may be off. How far such runs
end from the exact one says how far rounding may lead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon import Interleaved, MuonEq, NorMuon

from .case import Case, Param, gradient, initial

KELLER = ((3.4445, -4.7750, 2.0315),) * 5
# The scheme "hybrid": constant, poles, weights, linear, quadratic; all but the poles are scaled.
HYBRID_SCALE = 0.9965
HYBRID = (
    3.1704018547661341,
    (3.5154490461642852e-6, 0.0011762572161433672),
    (0.0037871130544655191, 0.062192209686380194),
    -5.6380618940000232,
    3.5270540107028435,
)
FACTORS = {
    "match_rms_adamw": lambda outputs, inputs: 0.2 * max(outputs, inputs) ** 0.5,
    "original": lambda outputs, inputs: max(1.0, outputs / inputs) ** 0.5,
    "spectral": lambda outputs, inputs: (outputs / inputs) ** 0.5,
}
DEFAULTS: dict[str, Any] = {
    "lr": 0.015,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "maximize": False,
    "adjust_lr_fn": "match_rms_adamw",
    "rule": (),
    "cautious_weight_decay": False,
    "momentum_dtype": None,
    "rounding": "nearest",
}


class Rounding:
    """Moves numbers at random within what p bits round: 2⁻ᵖ of each, √k times that of the parts of a sum of k."""

    def __init__(self, seed: int) -> None:
        # whether polynomials are evaluated at X·Xᵀ and multiplied by X at the end, or step by step
        self.gram = seed % 2 == 1
        self._generator = torch.Generator().manual_seed(seed)

    def moved(self, value: Tensor, size: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
        within = 2 * torch.rand(value.shape, generator=self._generator, dtype=torch.float64) - 1
        return value + within * (math.sqrt(terms) * torch.finfo(dtype).eps / 2) * size


@dataclass(frozen=True)
class Matrix:
    """Where a matrix of outputs × inputs is in a parameter."""

    expert: int | None
    rows: tuple[int, ...]
    flipped: bool  # its parameter has inputs × outputs

    def _whole(self, tensor: Tensor) -> Tensor:
        chosen = tensor if self.expert is None else tensor[self.expert]
        return chosen.mT if self.flipped else chosen.reshape(chosen.size(0), -1)

    def read(self, tensor: Tensor) -> Tensor:
        return self._whole(tensor)[list(self.rows)]

    def write(self, tensor: Tensor, value: Tensor) -> None:
        self._whole(tensor)[list(self.rows)] = value


def matrices(param: Param) -> Iterator[Matrix]:
    flipped = param.entry.get("dims") == "in_out"
    outputs = param.shape[2 if flipped else 1] if param.kind == "experts" else param.shape[0]
    split = param.entry.get("split", (outputs,))
    sizes, repeats = (split.sizes, split.repeats) if isinstance(split, Interleaved) else (split, 1)
    sizes = (sizes,) * (outputs // sizes) if isinstance(sizes, int) else sizes
    for expert in range(param.shape[0]) if param.kind == "experts" else (None,):
        start = 0
        for size in sizes:
            rows = [copy * sum(sizes) + start + row for copy in range(repeats) for row in range(size)]
            yield Matrix(expert, tuple(rows), flipped)
            start += size


class Oracle:
    """The run of a case on one device."""

    def __init__(self, case: Case, rounding: Rounding | None = None) -> None:
        self.case, self.rounding = case, rounding
        self.weights = [initial(case, k).double() for k in range(len(case.params))]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]
        self.memories: dict[tuple[int, Matrix], Tensor] = {}
        self.smallest_cautious = math.inf  # of |update|·√size over all elements that cautious decay has to judge
        self.touched: set[int] = set()
        self.adamw = {k: self._adamw(k) for k, param in enumerate(case.params) if param.kind == "adamw"}
        self.skipped = 0
        self.highest_lr = max([float(self._options(param)["lr"]) for param in case.params] + list(case.lrs))

    def _options(self, param: Param) -> dict[str, Any]:
        return {**DEFAULTS, **self.case.options, **self.case.groups.get(param.group, {})}

    def _adamw(self, k: int) -> torch.optim.AdamW:
        options = self._options(self.case.params[k])
        chosen = {key: options[key] for key in ("lr", "weight_decay", "maximize")}
        tensor = initial(self.case, k)
        return torch.optim.AdamW([tensor.requires_grad_()], betas=(0.9, 0.95), eps=1e-8, fused=True, **chosen)

    def run(self) -> Oracle:
        for step in range(self.case.steps):
            grads = [gradient(self.case, step, k) for k in range(len(self.case.params))]
            unfit = any(grad is not None and not grad.isfinite().all() for grad in grads)
            if unfit and (self.case.loss_scale is not None or self.case.options.get("nonfinite") == "skip"):
                self.skipped += 1
                continue
            for k, grad in enumerate(grads):
                if grad is not None:
                    self.touched.add(k)
                    self._step(k, grad, self.case.lrs[step] if self.case.lrs else None)
            if step in self.case.logits:
                self._clip(self.case.logits[step])
        return self

    def _step(self, k: int, grad: Tensor, lr: float | None) -> None:
        if k in self.adamw:
            group = self.adamw[k].param_groups[0]
            group["lr"] = group["lr"] if lr is None else lr
            group["params"][0].grad = grad
            self.adamw[k].step()
            self.weights[k] = group["params"][0].detach().double()
            return
        param = self.case.params[k]
        options = self._options(param)
        lr = float(options["lr"]) if lr is None else lr
        grad, momentum = grad.double(), options["momentum"]
        kept = momentum * self.momenta[k] + grad
        self.momenta[k] = self._stored(kept, options["momentum_dtype"] or param.dtype)
        update = grad + momentum * self.momenta[k] if options["nesterov"] else self.momenta[k]
        for matrix in matrices(param):
            self._move(k, matrix, self._stored(matrix.read(update), self._wide(param)), options, lr)

    def _move(self, k: int, matrix: Matrix, update: Tensor, options: dict[str, Any], lr: float) -> None:
        """One matrix: its rules, its orthogonalisation, its decay, its move."""
        param, rules = self.case.params[k], options["rule"]
        rules = [rules] if isinstance(rules, (str, NorMuon, MuonEq)) else list(rules)
        for rule in rules:
            if rule == "muoneq" or isinstance(rule, MuonEq):
                update = update / _norms(update)
        turned = update.size(0) > update.size(1)
        update = self._orthogonal(update.mT if turned else update, options.get("scheme"), self._wide(param))
        update = self._stored(update.mT if turned else update, self._wide(param))
        for rule in rules:
            if rule == "muon_plus":
                update = update * (min(update.shape) ** 0.5 / max(_norm(update), 1e-300))
            elif rule == "normuon" or isinstance(rule, NorMuon):
                update = self._divided(k, matrix, update, NorMuon() if rule == "normuon" else rule)
        weight = matrix.read(self.weights[k])
        decayed = weight * (1 - lr * options["weight_decay"])
        if options["cautious_weight_decay"]:
            self.smallest_cautious = min(self.smallest_cautious, float(update.abs().min()) * max(update.shape) ** 0.5)
            decayed = torch.where(update * weight >= 0, decayed, weight)
        rate = lr * FACTORS[options["adjust_lr_fn"]](*update.shape) * (-1 if options["maximize"] else 1)
        moved = decayed - rate * update
        random = options["rounding"] == "stochastic" and param.dtype == torch.bfloat16  # up to twice as far
        matrix.write(self.weights[k], self._stored(moved, param.dtype, by=2.0 if random else 1.0))

    def _divided(self, k: int, matrix: Matrix, update: Tensor, rule: NorMuon) -> Tensor:
        """NorMuon: each output, or each input, by the root of a running mean of its squares; the norm stays."""
        columns = rule.axis == "columns" or (rule.axis == "longer" and update.size(1) > update.size(0))
        along = 0 if columns else 1
        squares = (update * update).mean(along, keepdim=True)
        memory = self.memories.get((k, matrix), torch.zeros_like(squares))
        memory = self._stored(rule.beta2 * memory + (1 - rule.beta2) * squares, self._wide(self.case.params[k]))
        self.memories[k, matrix] = memory
        divided = update / torch.where(memory == 0, 1.0, memory).sqrt()
        return divided * (_norm(update) / max(_norm(divided), 1e-300))

    def _orthogonal(self, x: Tensor, scheme: Any, dtype: torch.dtype) -> Tensor:
        """``x`` has at least as many columns as rows."""
        if not bool((x != 0).any()):
            return x
        x = self._stored(x / x.abs().max(), dtype)
        x = self._stored(x / _norm(x), dtype)
        if scheme == "hybrid":
            return self._rational(x, dtype)
        steps: Sequence[Sequence[float]] = KELLER if scheme == "keller" else scheme
        if self.rounding is None or not self.rounding.gram:
            for a, b, c in steps:
                gram = self._product(x, x.mT, dtype)
                x = self._stored(
                    a * x + self._product(b * gram + c * self._product(gram, gram, dtype), x, dtype), dtype
                )
            return x
        gram = self._product(x, x.mT, dtype)
        factor = torch.eye(len(x), dtype=torch.float64)
        for a, b, c in steps:
            polynomial = a * torch.eye(len(x), dtype=torch.float64) + b * gram + c * self._product(gram, gram, dtype)
            factor = self._product(polynomial, factor, dtype)
            gram = self._product(self._product(polynomial, gram, dtype), polynomial, dtype)
        return self._product(factor, x, dtype)

    def _rational(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        constant, poles, weights, linear, quadratic = HYBRID
        gram, one = self._product(x, x.mT, dtype), torch.eye(len(x), dtype=torch.float64)
        factor = constant * one + linear * gram + quadratic * self._product(gram, gram, dtype)
        for pole, weight in zip(poles, weights, strict=True):
            shifted = gram + pole * one
            factor = factor + weight * _inverse(
                self._moved(shifted, shifted.abs() + gram.diagonal().max() * one, dtype, len(x))
            )
        return HYBRID_SCALE * self._product(factor, x, dtype)

    def _clip(self, logits: Sequence[float]) -> None:
        """QK-clip of layer 0; two query heads share a key head."""
        settings = self.case.options["clip_config"]
        dim, threshold = settings["head_dim"], settings["threshold"]
        for k, param in enumerate(self.case.params):
            if "q_proj" not in param.name and "k_proj" not in param.name:
                continue
            heads = param.shape[0] // dim
            shared = len(logits) // heads
            for head in range(heads):
                largest = max(logits[head * shared : (head + 1) * shared])
                if largest > threshold:
                    rows = slice(head * dim, (head + 1) * dim)
                    self.weights[k][rows] *= math.sqrt(threshold / largest)
                    if k in self.adamw:
                        self.adamw[k].param_groups[0]["params"][0].data[rows] *= math.sqrt(threshold / largest)

    # Rounding.

    def _wide(self, param: Param) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    def _moved(self, value: Tensor, size: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
        return value if self.rounding is None else self.rounding.moved(value, size, dtype, terms)

    def _stored(self, value: Tensor, dtype: torch.dtype, by: float = 1.0) -> Tensor:
        return self._moved(value, by * value.abs(), dtype, 1)

    def _product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return self._moved(a @ b, a.abs() @ b.abs(), dtype, a.size(1))


def _norm(x: Tensor) -> float:
    return math.sqrt(float((x * x).sum()))


def _norms(x: Tensor) -> Tensor:
    """Of all rows; 1 for zeros, (rows, 1)."""
    largest = x.abs().amax(1, keepdim=True)
    largest[largest == 0] = 1.0
    norms: Tensor = largest * ((x / largest) ** 2).sum(1, keepdim=True).sqrt()
    norms[norms == 0] = 1.0
    return norms


def _inverse(matrix: Tensor) -> Tensor:
    """Of a symmetric positive definite matrix, by Gauss and Jordan."""
    size = len(matrix)
    both = torch.cat([matrix, torch.eye(size, dtype=torch.float64)], 1)
    for k in range(size):
        both[k] = both[k] / both[k, k]
        for row in range(size):
            if row != k:
                both[row] = both[row] - both[row, k] * both[k]
    return both[:, size:]
