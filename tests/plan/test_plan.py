"""Plans of random parameters on random meshes: who computes what, and that senders and receivers find each other."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from meshmuon.errors import ConfigError
from meshmuon.layout import Layout, Mesh, Replicated, Sharded, shard_matrices
from meshmuon.plan import (
    EVERY_HOLDER,
    NO_WAVE,
    CostModel,
    PieceTransfer,
    Plan,
    PlannedParam,
    PlanOptions,
    cost_model_for,
    make_plan,
    routes_of,
    wave_sizes,
    waves,
)
from tests.support.plans import entry, line, options_for, plans, random_entries, random_options, random_plan, seeds

thorough = settings(max_examples=200)


@thorough
@given(plans)
def test_every_holder_gets_every_matrix_from_one_task(plan: Plan) -> None:
    """Once per replica set: the tasks of a matrix have disjoint holders, together all of them."""
    held: dict[tuple[int, int], Counter[int]] = {}
    for task in plan.tasks:
        held.setdefault((task.param, task.matrix), Counter()).update(task.sharded.holdings.keys())
    for k, one in enumerate(plan.params):
        for matrix in range(one.count):
            sharded_matrices = [shard_matrices(layout, one.stack_dims)[matrix] for layout in one.layouts]
            expected = Counter(rank for sharded in sharded_matrices for rank in sharded.holdings)
            assert held.pop((k, matrix), Counter()) == expected
            assert max(expected.values(), default=1) == 1
    assert not held
    assert {task.wave for task in plan.tasks} - {NO_WAVE} == set(range(len(plan.wave_lanes)))
    for task in plan.tasks:
        assert (task.wave == NO_WAVE) == (task.owner == EVERY_HOLDER)
        assert (
            task.sharded.whole if task.wave == NO_WAVE else plan.wave_lanes[task.wave] == plan.params[task.param].lane
        )


@settings(max_examples=60)
@given(plans)
def test_both_ends_of_every_pair_list_the_same(plan: Plan) -> None:
    """For each wave and each pair of ranks: the same tasks, the same pieces, in the same order; otherwise buffers
    mix up.
    """
    routes = {rank: routes_of(plan, rank) for rank in plan.ranks}
    for wave in range(len(plan.wave_lanes)):
        for out, into in (("gather_out", "gather_in"), ("scatter_out", "scatter_in")):
            sent: dict[tuple[int, int], list[PieceTransfer]] = {}
            received: dict[tuple[int, int], list[PieceTransfer]] = {}
            for rank in plan.ranks:
                sends, receives = (getattr(routes[rank][wave], way) for way in (out, into))
                # as an exchange wants them
                assert [send.target for send in sends] == sorted(send.target for send in sends)
                assert [send.source for send in receives] == sorted(send.source for send in receives)
                for send in sends:
                    assert send.source == rank
                    sent.setdefault((rank, send.target), []).append(send)
                for send in receives:
                    assert send.target == rank
                    received.setdefault((send.source, rank), []).append(send)
            assert sent == received
            for (a, b), pieces in sent.items():
                assert a != b  # nothing is sent to oneself
                assert [send.task for send in pieces] == sorted(send.task for send in pieces)
                assert all(plan.tasks[send.task].wave == wave for send in pieces)


@settings(max_examples=60)
@given(plans)
def test_what_arrives_is_the_whole_matrix_and_goes_back_to_all(plan: Plan) -> None:
    arrived: dict[int, list[PieceTransfer]] = {}
    returned: dict[int, list[PieceTransfer]] = {}
    for rank in plan.ranks:
        for wave in routes_of(plan, rank):
            assert {send.task for send in wave.staying} == set(wave.owned_tasks)
            assert {plan.tasks[task].owner for task in wave.owned_tasks} <= {rank}
            for send in (*wave.gather_in, *wave.staying):
                arrived.setdefault(send.task, []).append(send)
            for send in (*wave.scatter_in, *wave.staying):
                returned.setdefault(send.task, []).append(send)
    moving = [k for k, task in enumerate(plan.tasks) if task.wave != NO_WAVE]
    assert sorted(arrived) == sorted(returned) == moving
    for k in moving:
        sharded = plan.tasks[k].sharded
        # each piece once
        assert sorted(map(repr, (send.piece for send in arrived[k]))) == sorted(map(repr, sharded.pieces))
        assert all(send.source in send.piece.holders for send in arrived[k])
        assert len({sharded.holdings[send.source][1] for send in arrived[k]}) == 1  # from one replica, the owner's
        assert sorted(send.target for send in returned[k]) == sorted(sharded.holdings)
        assert all(send.target in send.piece.holders for send in returned[k])


@thorough
@given(plans)
def test_what_is_sent_is_the_sum_over_routes(plan: Plan) -> None:
    for rank in plan.ranks:
        nbytes = 0
        for wave in routes_of(plan, rank):
            for send in (*wave.gather_out, *wave.scatter_out):
                nbytes += send.piece.size * plan.params[plan.tasks[send.task].param].itemsize
        assert plan.bytes_sent[rank] == nbytes
    assert set(plan.bytes_sent) == set(plan.ranks)


@thorough
@given(seeds)
def test_share_has_one_owner_per_matrix(seed: int) -> None:
    plan = random_plan(seed, "share")
    found = Counter((task.param, task.matrix) for task in plan.tasks)
    for (k, matrix), count in found.items():
        sharded_matrices = [
            shard_matrices(layout, plan.params[k].stack_dims)[matrix] for layout in plan.params[k].layouts
        ]
        assert count == len(sharded_matrices)  # sibling meshes are other tensors under the same name
    for task in plan.tasks:
        assert (task.wave == NO_WAVE) == (task.sharded.whole and task.sharded.replicas == 1)


@thorough
@given(seeds)
def test_repeat_has_one_owner_per_replica(seed: int) -> None:
    plan = random_plan(seed, "repeat")
    found: dict[tuple[int, int], list[int]] = {}
    for task in plan.tasks:
        found.setdefault((task.param, task.matrix), []).append(task.owner)
        if task.sharded.whole:
            assert task.wave == NO_WAVE  # every holder has it whole: nothing travels
        else:
            assert task.sharded.replicas == 1
    for (k, matrix), owners in found.items():
        sharded_matrices = [
            shard_matrices(layout, plan.params[k].stack_dims)[matrix] for layout in plan.params[k].layouts
        ]
        assert len(owners) == sum(1 if sharded.whole else sharded.replicas for sharded in sharded_matrices)


@thorough
@given(seeds)
def test_waves_keep_to_the_chunk_size(seed: int) -> None:
    rng = random.Random(seed)
    entries, options = random_entries(rng), random_options(rng)
    options = replace(options, chunk_size=rng.randint(1, 5))
    plan = make_plan(entries, options)
    sizes = Counter(task.wave for task in plan.tasks if task.wave != NO_WAVE)
    assert all(size <= options.chunk_size for size in sizes.values())
    for lane in set(plan.wave_lanes):
        filled = [sizes[wave] for wave in range(len(plan.wave_lanes)) if plan.wave_lanes[wave] == lane]
        assert filled[:-1] == [options.chunk_size] * (len(filled) - 1)  # no more waves than that needs


def test_waves_overlap_when_the_work_is_worth_it() -> None:
    cost = CostModel(1e3, 1290.0)  # by which 8 matrices of 96 bytes on each rank are best in six waves
    heavy = make_plan([entry(f"p{k}", flops=1000) for k in range(32)], options_for(cost=cost))
    sizes = (1, 1, 2, 2, 1, 1)  # little waits for the first gather, and for the last scatter
    assert len(heavy.wave_lanes) == len(sizes)
    for wave, size in enumerate(sizes):  # every rank has work in every wave
        assert Counter(task.owner for task in heavy.tasks if task.wave == wave) == dict.fromkeys(range(4), size)
    many = make_plan([entry(f"p{k}", flops=1000) for k in range(480)], options_for(cost=cost))
    found = Counter(task.wave for task in many.tasks)
    assert [found[wave] for wave in range(9)] == [20, 40, 60, 80, 80, 80, 60, 40, 20]  # more is not worth it
    small = make_plan([entry(f"p{k}", flops=1000) for k in range(4000)], options_for(cost=cost, budget=100 * 96))
    found = Counter(task.wave for task in small.tasks)
    assert len(found) > 10
    assert max(found.values()) == pytest.approx(4 * found[0], rel=0.05)  # waves grow to four times the first
    assert [found[wave] for wave in range(4)] == pytest.approx([k * found[0] for k in (1, 2, 3, 4)], rel=0.05)
    slow = make_plan(heavy.params, options_for(cost=CostModel(1e3, 1e6)))
    assert len(slow.wave_lanes) == 1  # an exchange takes longer than all the bytes
    two_each = make_plan([entry(f"p{k}", flops=1000) for k in range(8)], options_for(cost=CostModel(1e3, 1.0)))
    assert len(two_each.wave_lanes) == 2


@pytest.mark.parametrize("several_nodes", [False, True])
@pytest.mark.parametrize("nbytes", [10**5, 10**6, 10**7])
def test_the_number_of_waves_is_the_best_by_its_formula(nbytes: int, several_nodes: bool) -> None:
    """Among all numbers: exposed are 4/(w + 1)² of the bytes, and each wave costs 28 exchanges and peers."""
    cost, peers = CostModel(10.0, 1e3, 20.0, 4e3, flops_per_peer=5.0), 100

    def seconds(waves: int) -> float:
        links = nbytes * (20.0 if several_nodes else 10.0)
        return 4 * links / (waves + 1) ** 2 + waves * 2 * (14 * (4e3 if several_nodes else 1e3) + 5.0 * peers)

    found = cost.waves(nbytes, peers, several_nodes=several_nodes, most=60)
    best = min(range(1, 61), key=seconds)
    assert abs(found - best) <= 1
    assert seconds(found) <= 1.02 * seconds(best)
    assert cost.waves(nbytes, peers, several_nodes=several_nodes, most=3) == min(3, found)


def test_the_number_of_waves_is_found_in_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try looks at every matrix: thousands of waves must not take thousands of tries, nor one by one from the
    few.
    """
    tries, fits = [], waves._LaneCutter._fits

    def counted(lane: waves._LaneCutter, count: int) -> bool:
        tries.append(count)
        return fits(lane, count)

    monkeypatch.setattr(waves._LaneCutter, "_fits", counted)
    plan = make_plan([entry(f"p{k}") for k in range(4000)], options_for(budget=2 * 8 * 6 * 4))
    assert len(plan.wave_lanes) > 200
    assert len(tries) < 12


BASE = entry(mesh=Mesh((2, 2), (0, 1, 2, 3)), placements=(Sharded(0), Replicated()))
CHANGES: dict[str, tuple[PlannedParam, PlanOptions]] = {
    "name": (replace(BASE, name="q"), options_for()),
    "shape": (entry(shape=(8, 7), mesh=BASE.layouts[0].mesh, placements=BASE.layouts[0].placements), options_for()),
    "mesh shape": (entry(mesh=Mesh((4, 1), (0, 1, 2, 3)), placements=BASE.layouts[0].placements), options_for()),
    "mesh order": (entry(mesh=Mesh((2, 2), (0, 2, 1, 3)), placements=BASE.layouts[0].placements), options_for()),
    "mesh ranks": (entry(mesh=Mesh((2, 2), (0, 1, 2, 4)), placements=BASE.layouts[0].placements), options_for()),
    "placement": (entry(mesh=BASE.layouts[0].mesh, placements=(Replicated(), Sharded(0))), options_for()),
    "dim": (entry(mesh=BASE.layouts[0].mesh, placements=(Sharded(1), Replicated())), options_for()),
    "stride": (entry(mesh=BASE.layouts[0].mesh, placements=(Sharded(0, 2), Replicated())), options_for()),
    "lane": (replace(BASE, lane="other"), options_for()),
    "itemsize": (replace(BASE, itemsize=4), options_for()),
    "flops": (replace(BASE, flops=1001), options_for()),
    "share": (replace(BASE, share=True), options_for()),
    "replicas": (BASE, options_for(replicas="share")),
    "chunk_size": (BASE, options_for(chunk_size=3)),
    "budget": (BASE, options_for(budget=100)),
    "in_flight": (BASE, options_for(in_flight=2)),
    "cost": (BASE, options_for(cost=cost_model_for("cuda"))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_digest_knows_every_fact(what: str) -> None:
    changed, options = CHANGES[what]
    before, after = make_plan([BASE], options_for()), make_plan([changed], options)
    assert before.digest != after.digest
    assert make_plan([BASE], options_for()).digest == before.digest


def test_the_digest_knows_order_lead_and_siblings() -> None:
    stack = entry(shape=(2, 3, 4), placements=(Replicated(),))
    digests = {
        make_plan(some, options_for()).digest
        for some in (
            [entry("a"), entry("b", shape=(4, 4))],
            [entry("b", shape=(4, 4)), entry("a")],
            [entry("a")],
            [
                replace(
                    entry("a"), layouts=(*entry("a").layouts, Layout((8, 6), Mesh((4,), (4, 5, 6, 7)), (Sharded(0),)))
                )
            ],
            [stack],
            [replace(stack, stack_dims=1)],
            [],
        )
    }
    assert len(digests) == 7


def test_the_digest_knows_which_parameter_lies_how() -> None:
    """Two layouts that swap parameters."""
    rows, cols = (Sharded(0),), (Sharded(1),)
    one = make_plan([entry("a", (4, 4), placements=rows), entry("b", (4, 4), placements=cols)], options_for())
    two = make_plan([entry("a", (4, 4), placements=cols), entry("b", (4, 4), placements=rows)], options_for())
    assert one.digest != two.digest


@thorough
@given(seeds)
def test_private_parameters_change_neither_owners_nor_digest(seed: int) -> None:
    """Plain tensors of one rank: others know nothing of them."""
    rng = random.Random(seed)
    entries, options = random_entries(rng), random_options(rng)
    ranks = tuple(sorted({rank for one in entries for layout in one.layouts for rank in layout.mesh.ranks}))
    mine = entry(
        "mine", (5, 7), Mesh((len(ranks),), ranks), (Replicated(),), private=True, flops=10**12, lane="private"
    )
    mixed = [*entries]
    for _ in range(rng.randint(1, 3)):
        mixed.insert(rng.randint(0, len(mixed)), replace(mine, name=f"mine {rng.random()}"))
    without, beside = make_plan(entries, options), make_plan(mixed, options)
    assert beside.digest == without.digest
    shared = [task for task in beside.tasks if not beside.params[task.param].private]
    assert [(task.matrix, task.owner, task.wave) for task in shared] == [
        (task.matrix, task.owner, task.wave) for task in without.tasks
    ]
    assert beside.wave_lanes == without.wave_lanes
    assert beside.loads == without.loads
    assert beside.bound == without.bound
    # whatever ``replicas`` says
    assert all(task.wave == NO_WAVE for task in beside.tasks if beside.params[task.param].private)
    assert beside.bytes_sent == without.bytes_sent


@thorough
@given(plans)
def test_loads_and_flops(plan: Plan) -> None:
    loads, flops = dict.fromkeys(plan.ranks, 0.0), dict.fromkeys(plan.ranks, 0.0)
    for task in plan.tasks:
        one = plan.params[task.param]
        for rank in task.sharded.holdings if task.owner == EVERY_HOLDER else [task.owner]:
            flops[rank] += one.flops
            loads[rank] += one.flops
            if task.owner != EVERY_HOLDER:
                copies = 1 + task.sharded.replicas
                loads[rank] += plan.options.cost.flops_per_byte * copies * task.sharded.size * one.itemsize
    assert plan.flops == pytest.approx(flops)
    assert plan.loads == pytest.approx(loads)


@thorough
@given(plans)
def test_buffers(plan: Plan) -> None:
    """A slot is as large as the largest of the waves that take turns in it."""
    for rank in plan.ranks:
        routes = routes_of(plan, rank)
        slots: dict[tuple[object, int], list[int]] = {}
        for k, wave in enumerate(routes):
            sizes = wave_sizes(wave)
            out, back = (sum(send.piece.size for send in sends) for sends in (wave.gather_out, wave.scatter_in))
            came, goes = (sum(send.piece.size for send in sends) for sends in (wave.gather_in, wave.scatter_out))
            own = sum(send.piece.size for send in wave.staying)
            assert (sizes.shards, sizes.staying_offset) == (max(out, back) + own, max(out, back))
            assert sizes.gathered == came
            assert sizes.results in (0, goes)
            if sizes.results == 0:  # results go back through ``theirs``: what came is what goes, piece by piece
                assert [(s.source, s.task, s.piece) for s in wave.gather_in] == [
                    (s.target, s.task, s.piece) for s in wave.scatter_out
                ]
            most = slots.setdefault((plan.wave_lanes[k], k % plan.options.in_flight), [0, 0, 0])
            for n, size in enumerate((sizes.shards, sizes.gathered, sizes.results)):
                most[n] = max(most[n], size)
        itemsize = {one.lane: one.itemsize for one in plan.params}
        assert plan.buffer_bytes(rank) == sum(itemsize[lane] * sum(most) for (lane, _), most in slots.items())


def test_an_owner_of_shared_and_of_sharded_matrices_has_one_buffer_for_all_results() -> None:
    """48 elements in four pieces, and 48 that three other ranks get as well: 36 arrive, 36 + 3 · 48 leave."""
    plan = make_plan([entry("a"), entry("b", placements=(Replicated(),), share=True)], options_for())
    plan = replace(plan, tasks=tuple(replace(task, owner=0, wave=0) for task in plan.tasks), wave_lanes=("lane",))
    assert wave_sizes(routes_of(plan, 0)[0])[1:] == (0, 36, 36 + 3 * 48)
    assert plan.buffer_bytes(0) == 2 * (12 + 48 + 36 + 36 + 3 * 48)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp_sends_each_element_there_and_back(ranks: int, dim: int) -> None:
    """Of P elements an owner lacks (W − 1)/W, which come and go: 2(W − 1)/W² · P per rank on average."""
    shapes = [(48, 96), (96, 48), (144, 48), (48, 48), (240, 48)]
    plan = make_plan([entry(f"p{k}", s, line(ranks), (Sharded(dim),)) for k, s in enumerate(shapes)], options_for())
    total = sum(rows * cols for rows, cols in shapes)
    assert sum(plan.bytes_sent.values()) * ranks == 2 * 2 * (ranks - 1) * total  # two bytes an element


@pytest.mark.parametrize(
    ("placements", "flops", "pays"),
    [
        ((Replicated(),), 0, False),  # nothing to save, matrices to send
        # 16 matrices for each rank, or 4 for each, which cost 5 · 96 bytes more and two exchanges: 16·F = 4·(F + 480) +
        # 2.
        ((Replicated(),), 160, False),
        ((Replicated(),), 161, True),
        ((Replicated(),), 10**9, True),
        # Two shards: 8 for each rank, which cost 2 · 96 bytes, or 2 for each: 8·(F + 192) = 2·(F + 480).
        ((Replicated(), Sharded(0)), 0, True),
        ((Replicated(), Sharded(0)), 10**9, True),
    ],
)
def test_when_sharing_pays(placements: tuple[object, ...], flops: int, pays: bool) -> None:
    mesh = Mesh((4,) if len(placements) == 1 else (4, 2), tuple(range(4 if len(placements) == 1 else 8)))
    alike = [entry(f"p{k}", mesh=mesh, placements=placements, flops=flops) for k in range(16)]  # type: ignore[arg-type]
    one, cost = alike[0], CostModel(1.0, 1.0)
    plan = make_plan(alike, options_for(cost=cost))
    assert {task.wave != NO_WAVE and task.sharded.replicas > 1 for task in plan.tasks} == {pays}
    for share in (True, False):  # the entry's own word counts where ``replicas`` is "auto", and only there
        (first, *_) = make_plan([replace(one, share=share)], options_for(cost=cost)).tasks
        assert (first.sharded.replicas > 1 and first.wave != NO_WAVE) is share
        (first, *_) = make_plan([replace(one, share=share)], options_for(cost=cost, replicas="share")).tasks
        assert first.sharded.replicas > 1
        assert first.wave != NO_WAVE


def test_matrices_without_elements_are_not_planned() -> None:
    plan = make_plan(
        [entry(shape=(0, 6)), entry("q", shape=(4, 0)), entry("r", shape=(0, 2, 2), stack_dims=1)], options_for()
    )
    assert plan.tasks == ()
    assert plan.wave_lanes == ()
    assert plan.bound == 0.0
    assert plan.ranks == (0, 1, 2, 3)


def test_no_parameters() -> None:
    plan = make_plan([], options_for())
    assert (plan.ranks, plan.tasks, plan.wave_lanes, plan.loads) == ((), (), (), {})


def test_unknown_replicas_option() -> None:
    with pytest.raises(ConfigError, match="replicas='both'"):
        options_for(replicas="both")
