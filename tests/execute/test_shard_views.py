"""The elementwise ends of a step: momentum once per parameter, gradients freed where asked, parts of local tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon.execute import StepParam, StepSettings
from meshmuon.execute.elementwise import accumulate, apply, look_ahead
from meshmuon.execute.shard_views import GradientReads, ShardView, ShardViews, grouped
from meshmuon.matrices import MatrixSet
from meshmuon.ortho import keller

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad() -> Any:
    with torch.no_grad():
        yield


def settings_for(**options: Any) -> StepSettings:
    numbers: dict[str, Any] = {"momentum": 0.5, "nesterov": True, "free_grad": False, "decay": 1.0, "rate": 1.0}
    numbers["retain"] = options.get("momentum", numbers.get("momentum"))
    return StepSettings(**{**numbers, "adjust": lambda rows, cols: 1.0, **options})


def work_for(value: float, *, group: int = 0, shape: tuple[int, ...] = (2, 3), zeros: bool = False, **options: Any) -> StepParam:
    """A parameter of ones with momentum ``value`` and gradient ``10·value``."""
    param = nn.Parameter(torch.ones(shape))
    param.grad = None if zeros else torch.full(shape, 10 * value)
    matrix_set = MatrixSet(1, *shape) if len(shape) == 2 else MatrixSet(*shape, stack_dims=1)
    buffer = torch.full(shape, value)
    stand_in = torch.zeros(shape) if zeros else None
    return StepParam(
        param, buffer, matrix_set, keller(1), torch.float32, settings_for(**options), group_index=group, zeros=stand_in
    )


def values(tensors: list[Tensor]) -> list[float]:
    assert all(len(set(tensor.flatten().tolist())) == 1 for tensor in tensors)
    return [float(tensor.flatten()[0]) for tensor in tensors]


def test_momentum_of_those_that_begin() -> None:
    step_params = [work_for(1.0), work_for(2.0), work_for(3.0)]
    GradientReads(first_here=(0, 2), last_here=(1,)).accumulate_momentum(step_params)
    assert values([one.momentum for one in step_params]) == [10.5, 2.0, 31.5]
    assert all(one.param.grad is not None for one in step_params)
    assert values([one.param.detach() for one in step_params]) == [1.0] * 3


def test_momentum_is_of_each_group() -> None:
    step_params = [
        work_for(1.0, group=0, momentum=0.5),
        work_for(1.0, group=1, momentum=0.25),
        work_for(2.0, group=0, momentum=0.5),
    ]
    GradientReads(first_here=(0, 1, 2)).accumulate_momentum(step_params)
    assert values([one.momentum for one in step_params]) == [10.5, 10.25, 21.0]


def test_momentum_where_only_other_ranks_have_a_gradient() -> None:
    step_params = [work_for(2.0, zeros=True)]
    gradient_reads = GradientReads((0,), (0,))
    gradient_reads.accumulate_momentum(step_params)
    assert values([step_params[0].momentum]) == [1.0]
    assert values(list(gradient_reads.gradients(step_params))) == [0.0]
    gradient_reads.free_gradients(step_params)
    assert step_params[0].param.grad is None


def test_gradients_are_freed_where_they_end_and_the_group_asks() -> None:
    step_params = [work_for(1.0, free_grad=True), work_for(2.0, free_grad=True), work_for(3.0, free_grad=False)]
    gradient_reads = GradientReads(first_here=(0, 1, 2), last_here=(1, 2))
    assert values(list(gradient_reads.gradients(step_params))) == [20.0, 30.0]
    gradient_reads.free_gradients(step_params)
    assert [one.param.grad is None for one in step_params] == [False, True, False]


def test_touching_nothing() -> None:
    step_params = [work_for(1.0, free_grad=True)]
    gradient_reads = GradientReads()
    gradient_reads.accumulate_momentum(step_params)
    gradient_reads.free_gradients(step_params)
    assert list(gradient_reads.gradients(step_params)) == []
    assert values([step_params[0].momentum]) == [1.0]
    assert step_params[0].param.grad is not None


@pytest.mark.parametrize("nesterov", [True, False])
def test_filling_whole_tensors_and_parts(nesterov: bool) -> None:
    step_params = [work_for(1.0, nesterov=nesterov), work_for(2.0, shape=(4, 2, 3), nesterov=nesterov, group=1, momentum=0.25)]
    memory = torch.zeros(30)
    parts = ShardViews(
        [ShardView(0, None, memory[:6].view(2, 3)), ShardView(1, (slice(1, 3),), memory[6:18].view(2, 2, 3))],
        step_params,
    )
    step_params[1].momentum[1:3] = 3.0
    parts.fill(step_params)
    expected = [0.5 * 1.0 + 10.0, 0.25 * 3.0 + 20.0] if nesterov else [1.0, 3.0]
    assert values([memory[:6], memory[6:18], memory[18:]]) == [*expected, 0.0]


@pytest.mark.parametrize("tensor_rate", [True, False])
def test_applying_parts(tensor_rate: bool) -> None:
    rate: Any = torch.tensor(0.5) if tensor_rate else 0.5
    factors = {(2, 3): 2.0, (3, 2): 4.0}
    options: dict[str, Any] = {"rate": rate, "decay": 0.75, "adjust": lambda rows, cols: factors[rows, cols]}
    step_params = [work_for(1.0, **options), work_for(1.0, shape=(3, 2), **options), work_for(1.0, shape=(4, 2, 3), **options)]
    views = [torch.full((2, 3), 1.0), torch.full((3, 2), 1.0), torch.full((1, 2, 3), 8.0)]
    parts = [ShardView(0, None, views[0]), ShardView(1, None, views[1]), ShardView(2, (slice(2, 3),), views[2])]
    ShardViews(parts, step_params).apply(step_params)
    assert values([step_params[0].param, step_params[1].param, step_params[2].param[2]]) == [0.75 - 1.0, 0.75 - 2.0, 0.75 - 8.0]
    assert values([step_params[2].param[:2], step_params[2].param[3:]]) == [1.0, 1.0]  # the others wait for their own update


def test_parts_follow_the_memory_of_their_parameters() -> None:
    """Other data under the same parameter, as ``p.data = …`` gives it, is what the next step works on."""
    step_params = [work_for(1.0), work_for(1.0, shape=(4, 2, 3))]
    parts = ShardViews([ShardView(0, None, torch.ones(2, 3)), ShardView(1, (slice(2, 3),), torch.ones(1, 2, 3))], step_params)
    for value in (1.0, 5.0, 9.0):
        for one in step_params:
            one.param.data = torch.full(one.param.shape, value)
        parts.apply(step_params)
        assert values([step_params[0].param, step_params[1].param[2]]) == [value - 1.0] * 2


class Elsewhere(Tensor):
    """A tensor that says it is on a device with batched kernels."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


DTYPES = [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2]


@pytest.mark.parametrize(("grad_dtype", "momentum_dtype"), DTYPES)
def test_batched_and_single_operations_agree(grad_dtype: torch.dtype, momentum_dtype: torch.dtype) -> None:
    """What a GPU does, done here, beside what a CPU does; a fused multiply-add rounds once less."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).to(grad_dtype) for shape in ((5, 7), (3, 4), (40, 33))]
    start = [torch.randn(grad.shape, generator=generator).to(momentum_dtype) for grad in grads]
    wide = torch.float64 if grad_dtype == torch.float64 else torch.float32
    for kind in (Tensor, Elsewhere):
        buffers = [buffer.clone().as_subclass(kind) for buffer in start]
        views = [torch.zeros(grad.shape, dtype=wide).as_subclass(kind) for grad in grads]
        accumulate(buffers, grads, 0.9)
        look_ahead(views, grads, buffers, 0.9)
        for before, grad, buffer, view in zip(start, grads, buffers, views, strict=True):
            assert_near(buffer.as_subclass(Tensor), 0.9 * before.double() + grad.double())
            assert_near(view.as_subclass(Tensor), grad.double() + 0.9 * buffer.as_subclass(Tensor).double())


def assert_near(value: Tensor, exact: Tensor) -> None:
    """Within two roundings."""
    bound = torch.finfo(value.dtype).eps * (1 + float(exact.abs().max()))
    torch.testing.assert_close(value.double(), exact, rtol=0, atol=bound)


def test_grouping_keeps_the_order() -> None:
    assert grouped([5, 2, 3, 4, 7], lambda number: number % 2) == [[5, 3, 7], [2, 4]]
    assert grouped([], id) == []


@pytest.mark.parametrize("update", [1.0, -1.0, 0.0, -0.0])
def test_a_rate_of_zero_on_a_device_keeps_the_sign_of_zeros(update: float) -> None:
    params = [torch.tensor([-0.0, 0.0, 1.0])]
    apply(params, [torch.full((3,), update)], torch.tensor(1.0), torch.tensor(0.0))
    assert params[0].tolist() == [0.0, 0.0, 1.0]
    assert torch.signbit(params[0]).tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momentum_in_16_bits_is_rounded_alike_wherever_an_element_lies(dtype: torch.dtype) -> None:
    """In every cut of the tensor; by the product and by the sum."""
    generator = torch.Generator().manual_seed(0)
    grad, start = (torch.randn(203, generator=generator).to(dtype) for _ in range(2))
    expected = (start * 0.9) + grad
    for size in (203, 64, 7, 1):
        buffer = start.clone()
        accumulate(list(buffer.split(size)), list(grad.split(size)), 0.9)
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("tensor_rate", [True, False])
def test_cautious_decay_is_for_what_moves_towards_zero_or_not_at_all(tensor_rate: bool) -> None:
    params = [torch.tensor([8.0, 8.0, 8.0, -8.0])]
    rate: Any = torch.tensor(1.0) if tensor_rate else 1.0
    apply(params, [torch.tensor([1.0, -1.0, 0.0, -1.0])], 0.5, rate, cautious=True)
    assert params[0].tolist() == [3.0, 9.0, 4.0, -3.0]
