"""Timelines: what overlaps, what waits, and that the seconds of every rank come from what it really sends."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmuon.layout import Replicated
from meshmuon.plan import Nodes, Plan, make_plan, routes_of
from meshmuon.tools.predict.calibration import Calibration
from meshmuon.tools.predict.prediction import predict
from meshmuon.tools.predict.timeline import ON_LINKS, RankSpan, StepSeconds, Timeline, WaveSeconds, timeline_of
from tests.support.plans import (
    entry,
    line,
    options_for,
    plans,
    random_entries,
    random_nodes,
    random_options,
    ranks_of,
    seeds,
)
from tests.tools.predict.test_calibration import MEASURED

ON_GPU = replace(MEASURED, device="cuda")


def plan_on_nodes(seed: int) -> Plan:
    rng = random.Random(seed)
    params, options = random_entries(rng), random_options(rng)
    return make_plan(params, replace(options, nodes=random_nodes(rng, ranks_of(params))))


@settings(max_examples=60)
@given(seeds)
def test_traffic_is_what_the_routes_say(seed: int) -> None:
    plan = plan_on_nodes(seed)
    nodes, waves = plan.options.nodes or Nodes((plan.ranks,)), plan.traffic
    for at, rank in enumerate(plan.ranks):
        for traffic, routes in zip(waves, routes_of(plan, rank), strict=True):
            expected = [0] * 8
            lists = (routes.gather_out, routes.gather_in, routes.scatter_out, routes.scatter_in)
            for k, transfers in enumerate(lists):
                for transfer in transfers:
                    size = transfer.piece.size * plan.params[plan.tasks[transfer.task].param].itemsize
                    expected[2 * k + (nodes.node_of(transfer.source) != nodes.node_of(transfer.target))] += size
            counted = [
                counts[at]
                for exchange in (traffic.gather, traffic.scatter)
                for counts in (
                    exchange.sent_inside,
                    exchange.sent_between,
                    exchange.received_inside,
                    exchange.received_between,
                )
            ]
            assert counted == expected
            held = [*routes.staying, *routes.scatter_in]
            assert traffic.pieces[at] == len(held)
            assert traffic.elements[at] == sum(transfer.piece.size for transfer in held)
    exchanges = [exchange for wave in waves for exchange in (wave.gather, wave.scatter)]
    assert {rank: sum(e.sent[at] for e in exchanges) for at, rank in enumerate(plan.ranks)} == plan.bytes_sent
    assert sum(sum(e.received) for e in exchanges) == sum(plan.bytes_sent.values())


def constant(value: float) -> list[float]:
    return [value, value]


def two_ranks(waves: int, *, busy: float, exchange: float = 2.0, in_flight: int = 6) -> Timeline:
    """Two equal ranks; parts take 1 (momentum), 10 (orthogonalise), 1 (update), 3 (local), 5 (AdamW), 0.5 (host)
    seconds.
    """
    wave = WaveSeconds(constant(1.0), constant(exchange), constant(10.0), constant(exchange), constant(1.0))
    step = StepSeconds((0, 1), (wave,) * waves, constant(3.0), constant(5.0), constant(0.5), busy, in_flight)
    return timeline_of(step)


def test_on_cores_nothing_is_hidden() -> None:
    timeline = two_ranks(2, busy=1.0)
    assert timeline.seconds == 0.5 + 2 * (1 + 2 + 10 + 2 + 1) + 3 + 5
    assert "wait" not in timeline.totals(0)
    assert timeline.waited_for == timeline.exchanging == 8.0
    assert timeline.hidden == 0.0


def test_on_links_local_work_hides_the_first_gather_and_adamw_the_last_scatter() -> None:
    timeline = two_ranks(1, busy=0.0)
    assert timeline.spans(1) == [
        RankSpan("host", None, 0.0, 0.5),
        RankSpan("momentum", 0, 0.5, 1.5),
        RankSpan("gather", 0, 1.5, 3.5),
        RankSpan("local", None, 1.5, 4.5),
        RankSpan("orthogonalise", 0, 4.5, 14.5),
        RankSpan("scatter", 0, 14.5, 16.5),
        RankSpan("adamw", None, 14.5, 19.5),
        RankSpan("update", 0, 19.5, 20.5),
    ]
    assert timeline.exchanging == 4.0


def test_cores_that_copy_hide_the_rest_of_an_exchange() -> None:
    """Half of the gather's 8 s are copies. The other half passes while local work is done."""
    timeline = two_ranks(1, busy=0.5, exchange=8.0)
    assert [span for span in timeline.spans(0) if span.end <= 9.5 or span.kind == "gather"] == [
        RankSpan("host", None, 0.0, 0.5),
        RankSpan("momentum", 0, 0.5, 1.5),
        RankSpan("copy", 0, 1.5, 5.5),
        RankSpan("gather", 0, 1.5, 9.5),
        RankSpan("local", None, 5.5, 8.5),
        RankSpan("wait", 0, 8.5, 9.5),
    ]
    assert (
        two_ranks(1, busy=0.0, exchange=8.0).seconds < timeline.seconds < two_ranks(1, busy=1.0, exchange=8.0).seconds
    )


def test_slow_links_are_waited_for_in_the_order_of_exchanges() -> None:
    """Two waves: gathers 0 and 1 take 40 s each, and the first results queue behind the second gather."""
    timeline = two_ranks(2, busy=0.0, exchange=40.0)
    begins = {(span.kind, span.wave): span.start for span in timeline.spans(0)}
    assert begins["gather", 0] == 1.5
    assert begins["gather", 1] == 41.5
    assert begins["orthogonalise", 0] == 41.5
    assert begins["scatter", 0] == 81.5
    assert begins["update", 0] == 121.5
    assert [(span.wave, span.end) for span in timeline.spans(0) if span.kind == "wait"] == [
        (0, 41.5),
        (1, 81.5),
        (0, 121.5),
        (1, 161.5),
    ]
    assert timeline.seconds == 162.5


def test_the_slowest_rank_holds_the_others_up() -> None:
    wave = WaveSeconds([1.0, 4.0], [1.0, 1.0], [2.0, 0.0], [1.0, 1.0], [0.0, 0.0])
    timeline = timeline_of(StepSeconds((3, 5), (wave,), [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0, 1))
    assert timeline.totals(3) == {"momentum": 1.0, "gather": 1.0, "wait": 5.0, "orthogonalise": 2.0, "scatter": 1.0}
    assert timeline.ends == {3: 8.0, 5: 8.0}
    assert timeline.slowest == 5  # rank 3 waits for it
    assert timeline.seconds_by_kind == {"momentum": 4.0, "wait": 2.0, "others": 2.0}


@pytest.mark.parametrize("busy", [0.0, 0.5, 1.0])
def test_the_parts_of_a_wave_follow_each_other_in_every_order(busy: float) -> None:
    """3 + 4 + 5 + 6 + 7 s on rank 1, whose links and whose work each take less."""
    wave = WaveSeconds([0.0, 3.0], [0.0, 4.0], [0.0, 5.0], [0.0, 6.0], [0.0, 7.0])
    other = WaveSeconds([1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0])
    nothing = [0.0, 0.0]
    for waves in ((wave, other), (other, wave), (other, wave, other)):
        timeline = timeline_of(StepSeconds((0, 1), waves, nothing, nothing, nothing, busy, 6))
        assert 25.0 <= timeline.bound <= timeline.seconds


@settings(max_examples=60)
@given(plans, st.sampled_from([MEASURED, ON_GPU]))
def test_every_step_ends_and_no_rank_does_two_things_at_once(plan: Plan, machine: Calibration) -> None:
    prediction = predict(plan, machine)
    busiest = 0.0
    for rank in plan.ranks:
        spans = prediction.spans(rank)
        for on_links in (True, False):
            track = sorted((span for span in spans if (span.kind in ON_LINKS) is on_links), key=lambda span: span.start)
            for before, after in pairwise(track):
                assert before.end <= after.start + 1e-12
            busiest = max(busiest, sum(span.end - span.start for span in track))
    assert prediction.seconds >= busiest - 1e-12
    assert prediction.seconds >= prediction.bound * (1 - 1e-12)
    assert sum(prediction.seconds_by_kind.values()) == pytest.approx(prediction.seconds)


def test_a_host_that_is_slower_than_its_device_is_a_part_of_the_step() -> None:
    nothing = constant(0.0)
    wave = WaveSeconds(constant(1.0), constant(2.0), constant(10.0), constant(2.0), constant(1.0))
    step = StepSeconds((0, 1), (wave,), nothing, nothing, nothing, 0.0, 6, host_ahead=[3.0, 20.0])
    timeline = timeline_of(step)
    assert (timeline.seconds, timeline.slowest) == (20.0, 1)
    assert timeline.seconds_by_kind == {"momentum": 1.0, "orthogonalise": 10.0, "wait": 4.0, "update": 1.0, "host": 4.0}


def test_dist_muon_sends_gradients_as_it_sends_weights() -> None:
    """One whole matrix on four ranks, shared: three ranks send it to the owner, which sends it to three."""
    plan = make_plan([entry("p", (64, 64), line(4), (Replicated(),), flops=1, share=True)], options_for())
    on_one_node = replace(ON_GPU, between=None)
    plain, averaged = predict(plan, on_one_node), predict(plan, on_one_node, averages=True)
    size = 64 * 64 * 2
    assert averaged.exchanging == pytest.approx(2 * (3 * size / 5e8 + 1e-4))
    assert plain.exchanging == pytest.approx(3 * size / 5e8 + 2e-4)
    owned = averaged.totals(0)["orthogonalise"]
    assert owned == pytest.approx(1 / 1e10 + 64 * 64 * (3e-9 + 2e-9 + 2 * 4 * 1e-9))


def test_links_inside_and_between_nodes_have_their_own_rates() -> None:
    """A matrix of four pieces, two on each node. On links both kinds work at the same time."""
    plan = make_plan([entry("p", (64, 64))], options_for(nodes=Nodes.in_order(range(4), [2, 2])))
    piece = 64 * 16 * 2
    on_cores, on_links = predict(plan, MEASURED), predict(plan, ON_GPU)
    # The owner receives one piece inside its node and two from the other; cores count half of it, links all of it.
    assert on_cores.totals(0)["gather"] == pytest.approx(1e-4 + piece / 2 / 2e9 + 2 * piece / 2 / 1e9)
    assert on_links.totals(0)["gather"] == pytest.approx(1e-4 + 2 * piece / 1e9)
