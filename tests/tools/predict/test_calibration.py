"""Calibration files: read back as written, refused with the field that is wrong, and what plans take from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshmuon.errors import ConfigError
from meshmuon.layout import Replicated
from meshmuon.plan import CostModel, PlannedParam, cost_model_from, make_plan
from meshmuon.tools.predict.calibration import Calibration, ElementwiseRates, LinkRate, Rate
from meshmuon.tools.predict.prediction import predict
from tests.support.plans import entry, line, options_for

MEASURED = Calibration(
    device="cpu",
    device_name="a CPU",
    ranks=4,
    ranks_per_node=2,
    compute_dtype="float32",
    products=(Rate("float32", 512, 2e10), Rate("float64", 512, 1e10)),
    orthogonalisation=(Rate("float32", 256, 1e10), Rate("float32", 1024, 4e10)),
    inside=LinkRate(2e9, 1e-5),
    between=LinkRate(1e9, 2e-5),
    exchange=LinkRate(5e8, 1e-4),
    host_seconds_per_matrix=1e-5,
    host_seconds_per_step=1e-3,
    elementwise=ElementwiseRates(momentum=3e-9, update=2e-9, copy=1e-9, adamw=4e-9),
)


def written(folder: Path, content: Any) -> Path:
    path = folder / "doctor.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    alone = replace(MEASURED, between=None, inside=None)
    for calibration in (
        MEASURED,
        alone,
        replace(MEASURED, exchange_cpu_share=0.25),
        replace(MEASURED, seconds_per_peer=1e-6),
    ):
        assert Calibration.load(written(tmp_path, calibration.to_json())) == calibration
    assert "seconds_per_peer" not in MEASURED.to_json()
    report = {"format": "meshmuon doctor", "calibration": MEASURED.to_json()}
    assert Calibration.load(written(tmp_path, report)) == MEASURED


def test_plans_take_the_rate_of_large_matrices_and_of_whole_exchanges(tmp_path: Path) -> None:
    expected = CostModel(flops_per_byte=4e10 / 5e8, flops_per_exchange=4e10 * 1e-4)
    for missing in ("inside", "between"):  # measured on one node, or with one rank on each
        path = written(tmp_path, replace(MEASURED, **{missing: None}).to_json())
        assert Calibration.load(path).cost_model() == expected
    assert cost_model_from(path) == cost_model_from(str(path)) == expected
    per_peer = replace(MEASURED, seconds_per_peer=1e-6)
    assert cost_model_from(written(tmp_path, per_peer.to_json())) == replace(
        MEASURED.cost_model(), flops_per_peer=4e10 * 1e-6
    )
    assert MEASURED.cost_model() == CostModel(4e10 / 2e9, 4e10 * 1e-5, 4e10 / 1e9, 4e10 * 1e-4)
    assert cost_model_from(expected) is expected
    assert cost_model_from(None) is None


def changed(**fields: Any) -> dict[str, Any]:
    return {**MEASURED.to_json(), **fields}


POSITIVE, WHOLE, RATES = "must be a positive number", "must be a whole number", "must be a list of rates"
RATE = {"dtype": "float32", "size": 8, "flops_per_second": 1e9}
LINK = {"bytes_per_second": 1e9, "seconds": 1}
OF_PLANS: list[tuple[Any, str]] = [
    ("{", "it is not JSON"),
    ("[" * 100_000, "it is not JSON"),
    ("[1, 2]", "it is no calibration file"),
    ({"format": "something"}, "it is no calibration file"),
    (changed(version=2), "it has version 2 of the format, and this meshmuon reads version 1"),
    (changed(orthogonalisation=[]), rf"its orthogonalisation is \[\] and {RATES}"),
    (
        changed(orthogonalisation=[RATE | {"flops_per_second": 0}]),
        rf"its orthogonalisation.flops_per_second is 0 and {POSITIVE}",
    ),
    (changed(orthogonalisation=[RATE | {"size": 0}]), f"its orthogonalisation.size is 0 and {POSITIVE}"),
    (changed(exchange="fast"), f"its exchange.bytes_per_second is None and {POSITIVE}"),
    (changed(exchange=[1, 2]), f"its exchange.bytes_per_second is None and {POSITIVE}"),
    (changed(exchange=None), "it was measured on one rank and knows no link between ranks"),
    (changed(exchange=LINK | {"bytes_per_second": math.inf}), "its exchange.bytes_per_second is inf"),
    (changed(exchange=LINK | {"bytes_per_second": 1e-300}), f"is 1e-300 and {POSITIVE}"),
    (
        changed(
            between=None,
            exchange=LINK | {"bytes_per_second": 1e-9},
            orthogonalisation=[RATE | {"flops_per_second": 1e23}],
        ),
        "flops_per_byte=.* must be a number",
    ),
]
OTHERS: list[tuple[dict[str, Any], str]] = [  # which plans do not weigh
    ({"device": None}, "its device is None and must be text"),
    ({"seconds_per_peer": "1"}, f"its seconds_per_peer is '1' and {POSITIVE}"),
    ({"host_seconds_per_matrix": True}, f"its host_seconds_per_matrix is True and {POSITIVE}"),
    ({"host_seconds_per_step": math.nan}, f"its host_seconds_per_step is nan and {POSITIVE}"),
    ({"host_seconds_per_step": -1}, f"its host_seconds_per_step is -1 and {POSITIVE}"),
    ({"host_seconds_per_step": 10**400}, "is a number of 1329 bits and must be between"),
    ({"elementwise": 3}, "its elementwise is 3 and must be the times of elementwise work. Write"),
    ({"elementwise": {"momentum": 1, "update": 1}}, f"its elementwise.copy is None and {POSITIVE}"),
    ({"ranks": 10**9}, f"its ranks is 1000000000 and {WHOLE} from 1 to 10000000"),
    ({"ranks": 1.5}, f"its ranks is 1.5 and {WHOLE}"),
    ({"ranks": math.inf}, f"its ranks is inf and {WHOLE}"),
    ({"ranks_per_node": 0.5}, f"its ranks_per_node is 0.5 and {WHOLE}"),
    ({"products": [RATE | {"size": 0.4}]}, rf"its products\[0\].size is 0.4 and {WHOLE}"),
    ({"products": [RATE | {"length": -1}]}, rf"its products\[0\].length is -1 and {WHOLE}"),
    ({"products": "x" * 10**6}, "its products is 'x{119} and must be a list"),
    ({"products": [1, 2]}, rf"its products is \[1, 2\] and {RATES}"),
]


@pytest.mark.parametrize(("content", "text"), OF_PLANS, ids=[text for _, text in OF_PLANS])
def test_a_file_that_plans_cannot_use_is_refused(content: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^cost_model='.*doctor.json': .*{text}"):
        cost_model_from(written(tmp_path, content))


@pytest.mark.parametrize(("fields", "text"), OTHERS, ids=[text for _, text in OTHERS])
def test_a_file_that_predictions_cannot_use_is_refused(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        Calibration.load(written(tmp_path, changed(**fields)))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^cost_model='.*none.json': it cannot be read: No such file.*doctor --save FILE"
    ):
        cost_model_from(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="it cannot be read: Is a directory"):
        cost_model_from(tmp_path)


@pytest.mark.parametrize("value", [1, 1.5, True, b"file", "", ["file"]])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^cost_model=.* must be a CostModel, the name of a calibration file, or None"
    ):
        cost_model_from(value)


@pytest.mark.parametrize(
    "numbers", [(-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf), ("1", 1.0), (True, 1.0)]
)
def test_cost_models_that_no_plan_could_use(numbers: Any) -> None:
    with pytest.raises(ConfigError, match="CostModel: flops_per_"):
        CostModel(*numbers)


def test_rates_between_two_sizes() -> None:
    rates = [MEASURED.orthogonalisation_rate(size) for size in (1, 256, 512, 1024, 9999)]
    assert rates == pytest.approx([1e10, 1e10, 2e10, 4e10, 4e10])


def test_the_nearest_shape_that_was_measured_counts(tmp_path: Path) -> None:
    """Square matrices count as measured at every size: 100 × 400 is as far from 400 × 400 as it is long."""
    shapes = (Rate("float32", 128, 3e10, 256), *MEASURED.orthogonalisation, Rate("float32", 2048, 9e10, 8192))
    calibration = replace(
        MEASURED, orthogonalisation=shapes, alone=(Rate("float32", 128, 2e10, 256), Rate("float32", 256, 8e9))
    )
    assert Calibration.load(written(tmp_path, calibration.to_json())) == calibration
    assert calibration.cost_model() == MEASURED.cost_model()  # of square matrices alone
    expected = {
        (128, 256): 3e10,
        (100, 300): 3e10,
        (128, 128): 1e10,
        (512, 512): 2e10,
        (1024, 8192): 9e10,
        (0, 8): 1e10,
    }
    assert {sides: calibration.orthogonalisation_rate(*sides) for sides in expected} == pytest.approx(expected)
    assert [calibration.rate_alone(128, 256), calibration.rate_alone(1024)] == [2e10, 8e9]
    of_shapes_alone = replace(MEASURED, orthogonalisation=shapes[:1])
    assert of_shapes_alone.orthogonalisation_rate(512) == 3e10


@pytest.mark.parametrize(
    ("shape", "count", "seconds"), [((256, 128), 1, 0.25), ((256, 128), 4, 0.55), ((256, 256), 4, 0.4)]
)
def test_a_batch_takes_a_single_matrix_and_the_others(shape: tuple[int, int], count: int, seconds: float) -> None:
    rates = (Rate("float32", 128, 1e10, 256), Rate("float32", 256, 1e10))
    calibration = replace(MEASURED, orthogonalisation=rates, alone=(Rate("float32", 128, 4e9, 256), *rates[1:]))
    experts = entry("experts", (count, *shape), line(1), (Replicated(),), stack_dims=1, flops=10**9)
    plan = make_plan([experts], options_for(cost=calibration.cost_model()))
    elementwise = count * (1e-5 + 5e-9 * math.prod(shape))
    assert predict(plan, calibration).seconds_by_kind["local"] == pytest.approx(seconds + elementwise)


def test_a_prediction_is_the_sum_over_the_slowest_rank() -> None:
    """Two equal matrices of 1024 × 1024 on four ranks: owners compute one each, and all ranks send pieces."""
    params: list[PlannedParam] = [entry(f"p{k}", (1024, 1024), flops=8 * 10**9) for k in range(2)]
    plan = make_plan(params, options_for(cost=MEASURED.cost_model(), chunk_size=2))
    assert len(plan.wave_lanes) == 1
    prediction, piece = predict(plan, replace(MEASURED, between=None)), 2**20 // 4
    # An owner receives three pieces of its matrix and sends one of the other, and the other way round. Cores do both in
    # turn.
    moved = (3 + 1) / 2 * 2 * piece
    assert prediction.seconds_by_kind == pytest.approx(
        {
            "host": 1e-3,
            "momentum": 2 * 5e-6 + 2 * piece * 3e-9,
            "gather": 1e-4 + moved / 5e8,
            "orthogonalise": 8e9 / 4e10 + 2 * 2**20 * 1e-9,
            "scatter": 1e-4 + moved / 5e8,
            "update": 2 * 5e-6 + 2 * piece * 2e-9,
        }
    )
    assert prediction.seconds == pytest.approx(sum(prediction.seconds_by_kind.values()))
    # one of several nodes
    assert predict(plan, MEASURED).seconds_by_kind["gather"] == pytest.approx(1e-5 + moved / 2e9)


def test_an_exchange_takes_the_time_of_cores_alone() -> None:
    shared = replace(MEASURED, exchange_cpu_share=0.25)
    busy = [calibration.exchange_busy for calibration in (MEASURED, shared, replace(shared, device="cuda"))]
    assert busy == [1.0, 0.25, 0.0]
    assert replace(MEASURED, exchange_cpu_share=1.7).exchange_busy == 1.0


def test_predictions_have_the_copies_of_the_slowest_rank() -> None:
    calibration = replace(MEASURED, copies=LinkRate(2.5e8, 1e-5))
    plan = make_plan(
        [entry("p", (1024, 1024), flops=8 * 10**9, staged=True)], options_for(cost=calibration.cost_model())
    )
    with_copies, without = predict(plan, calibration), predict(plan, MEASURED)
    assert with_copies.seconds == pytest.approx(without.seconds + 2 * 256 * 1024 * 2 / 2.5e8)
    local = make_plan(
        [entry("experts", (4, 512, 1024), stack_dims=1, staged=True)], options_for(cost=calibration.cost_model())
    )
    assert predict(local, calibration).seconds == pytest.approx(
        predict(local, MEASURED).seconds + 2 * 512 * 1024 * 2 / 2.5e8
    )
    on_device = make_plan([replace(param, staged=False) for param in plan.params], plan.options)
    assert predict(on_device, calibration).seconds == pytest.approx(without.seconds)


def test_a_calibration_gives_the_price_of_copies(tmp_path: Path) -> None:
    for several in (True, False):
        calibration = replace(MEASURED, copies=LinkRate(2.5e8, 1e-5), between=MEASURED.between if several else None)
        assert Calibration.load(written(tmp_path, calibration.to_json())) == calibration
        assert calibration.cost_model().per_byte_of_host == pytest.approx(4e10 / 2.5e8)
    older = {name: value for name, value in MEASURED.to_json().items() if name != "copies"}
    assert Calibration.load(written(tmp_path, older)) == MEASURED
    assert MEASURED.cost_model().per_byte_of_host == MEASURED.cost_model().flops_per_byte
