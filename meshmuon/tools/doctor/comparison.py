"""Parameters on a layout beside the same parameters on one device, stepped with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...optim import Muon
from ...ortho import AUTO, Scheme, default_compute_dtype, scheme_for
from ...params.dtensors import as_dtensor
from ...params.lr import lr_factor
from ...torch_compat import local_part
from .context import Context, Finding
from .numerics import rounding_bound, seeded, unit_roundoff


class Net(nn.Module):
    """Two layers with a tanh in between: ``first`` for column-wise, ``second`` for row-wise parallelism."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, out)
        for k, param in enumerate(self.parameters()):
            param.data.copy_(seeded(tuple(param.shape), k))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


def like(param: Tensor, value: Tensor) -> Tensor:
    """A copy of a whole tensor, cut as ``param`` is; a sharded tensor stays as it is."""
    from torch.distributed.tensor import distribute_tensor

    sharded = as_dtensor(param)
    if sharded is None or as_dtensor(value) is not None:
        return value.detach().clone()
    return distribute_tensor(value.detach().clone(), sharded.device_mesh, sharded.placements, src_data_rank=None)


def named(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, also of one that DDP has wrapped."""
    return {name.removeprefix("module."): param for name, param in model.named_parameters()}


def muon_on(params: Mapping[str, Tensor], **options: Any) -> Muon:
    """Muon on the matrices and stacks of experts, AdamW on the rest; ``deterministic``, so that threads change no
    bit.
    """
    groups = [
        {"params": chosen, "use_muon": use_muon, **({"expert_keys": ["experts"]} if use_muon else {})}
        for use_muon in (True, False)
        if (chosen := [(name, param) for name, param in params.items() if (param.dim() > 1) is use_muon])
    ]
    return Muon(groups, deterministic=True, **{"lr": 0.01, **options})


class Comparison:
    """Steps parameters on a layout beside ``whole`` ones on one device and compares them.

    On a CPU they must be equal bit for bit, unless ``wire`` is a dtype of 16 bits. Elsewhere each step may add what
    rounding explains: both sides may be off by the bound of their products, the layout also by what is rounded on the
    wire.

    ``params`` may be replaced between steps, together with ``optimizer``. ``wire`` is None for the default of the
    device.
    """

    against = "one device"

    def __init__(
        self,
        context: Context,
        params: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        optimizer: Optimizer | None = None,
        reference: Muon | None = None,
        *,
        wire: torch.dtype | None = None,
    ) -> None:
        self.params, self.optimizer = params, optimizer or muon_on(params)
        self._context, self._whole, self._reference = context, whole, reference or muon_on(whole)
        # names of those without any tolerance
        self.exact = set(whole) if context.exact and wire is None else set[str]()
        self._wire = wire or (torch.float32 if context.device.type == "cpu" else torch.bfloat16)
        self._allowed = dict.fromkeys(whole, 0.0)
        self._steps = 0
        self._groups = {param: group for group in self._reference.param_groups for param in group["params"]}

    def run(self, steps: Iterable[int], give_gradients: Callable[[int], object] | None = None) -> Comparison:
        """Makes these steps. ``give_gradients`` gives both sides the same gradients; by default seeded ones.
        Returns itself.
        """
        steps = list(steps)
        for step in steps:
            with self._context.doing(f"step {step + 1} of {steps[-1] + 1}"):
                (give_gradients or self._give_seeded)(step)
                self.optimizer.step()
                for name, param in self._whole.items():
                    self._allowed[name] += 0.0 if name in self.exact else self._allowance(param)
                self._reference.step()
                self._steps += 1
        return self

    def finding(self, layout: str, more: Iterable[str] = ()) -> Finding:
        """Which of the parameters on the layout are not as one device has them, and ``more`` problems."""
        problems = [*more]
        for name, param in self._whole.items():
            shard, expected = (
                local_part(t.detach()).cpu() for t in (self.params[name], like(self.params[name], param))
            )
            if shard.numel() == expected.numel() == 0:  # wrappers give empty shards other shapes
                continue
            error = (
                float((shard.double() - expected.double()).norm()) if shard.shape == expected.shape else float("inf")
            )
            if not error <= self._allowed[name]:
                why = (
                    "they must be equal bit for bit"
                    if name in self.exact
                    else f"rounding explains {self._allowed[name]:.2e}"
                )
                problems.append(f"{name} differs from {self.against} by {error:.2e} after {self._steps} steps; {why}")
        same = f"the bits of {self.against}" if self.exact else f"{self.against}'s result within rounding"
        return Finding(f"{layout}: {same} after {self._steps} steps", problems)

    def _give_seeded(self, step: int) -> None:
        for k, (name, param) in enumerate(self._whole.items()):
            gradient = seeded(tuple(param.shape), 1000 * (step + 1) + k).to(param)
            param.grad, self.params[name].grad = gradient, like(self.params[name], gradient)

    def _allowance(self, param: Tensor) -> float:
        """What this step's rounding may change of a parameter."""
        stored = 4 * unit_roundoff(param.dtype, param.device) * float(local_part(param.detach()).norm())
        if param.dim() < 2 or param.grad is None:
            return stored
        group = self._groups[param]
        before = self._reference.state[param].get("momentum_buffer", torch.zeros_like(param))
        update = param.grad + group["momentum"] * (group["momentum"] * before + param.grad)
        squares = 0.0
        for matrix in update if param.dim() == 3 else (update,):
            rows, cols = matrix.shape
            compute = default_compute_dtype(param.device, torch.float32, AUTO, min(rows, cols))
            scheme = scheme_for(AUTO, rows, cols, compute, param.device)
            assert isinstance(scheme, Scheme)
            bound = rounding_bound(matrix, scheme, compute, sent=unit_roundoff(self._wire, torch.device("cpu")))
            squares += (2 * group["lr"] * lr_factor(group["adjust_lr_fn"], rows, cols) * bound) ** 2
        return stored + float(squares**0.5)
