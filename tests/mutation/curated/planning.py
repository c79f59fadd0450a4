"""Mutants of who holds what, who owns what, and what travels when."""

from __future__ import annotations

from . import Mutants

MUTANTS: Mutants = {
    "meshmuon.matrices": {
        "_before_split": (
            ("MatrixSet(1, $shape[0], $shape[1], flipped=$flipped)", "MatrixSet(1, $shape[1], $shape[0], flipped=$flipped)"),
            ('$known.dims == "in_out"', "False"),
            ("$flipped or $options.expert_dims == $dims", "$options.expert_dims == $dims"),
            ("$shape[1:]", "$shape[2:]"),
        ),
        "_parts": (
            ("StridedRange($start, $size, $repeats, $period)", "StridedRange($start, $size, $repeats, $size)"),
            ("tuple($size * $repeats for $size in $sizes)", "tuple($size for $size in $sizes)"),
        ),
        "StridedRange.before": (("$block * self.size + min($within, self.size)", "$block * self.size + $within"),),
        "StridedRange.between": (
            ("-(-$first // self.size) * self.size", "$first // self.size * self.size"),
            ("max($head_stop, $last // self.size * self.size)", "$last"),
        ),
        "StridedRange._at_positions": (("self.start + $block * self.period + $within", "self.start + $block * self.period"),),
        "StridedRange.joined": (
            ("$regular and self.size == $following.size", "$regular"),
            ("$part.count == 1 or $part.period == $gap", "True"),
        ),
    },
    "meshmuon.layout.cuts": {
        "_chunk": (("-(-length($ranges) // $parts)", "length($ranges) // $parts"),),
        "_shard": (
            (
                "[_chunk($piece, $parts) for $piece in _chunk($ranges, $split_factor)]",
                "[_chunk($piece, $parts) for $piece in _chunk($ranges, $parts)]",
            ),
        ),
        "_between_positions": (("max($start, $start + $first - $position)", "$start"),),
        "local_indices": (
            ("$inside.moved($offset - $start)", "$inside.moved(-$start)"),
            ("$found[-1].joined($local)", "None"),
        ),
    },
    "meshmuon.layout.layout": {
        "flat_index": (("$index * $shape[$axis] + $where[$axis]", "$index + $where[$axis] * $shape[$axis]"),),
    },
    "meshmuon.layout.sharded_matrix": {
        "ShardedMatrix.senders": (("$piece.holders[$replica]", "$piece.holders[0]"),),
        "ShardedMatrix.sends_to": (("self.holdings[$owner][1]", "0"),),
        "ShardedMatrix.separate_replicas": (("$p.holders[$k]", "$p.holders[0]"),),
        "_flatten": (("($index * $size + $start, $index * $size + $stop)", "($index + $start * $size, $index + $stop * $size)"),),
        "ShardedMatrix._check_pieces": (("len(self.holdings) != len(self.pieces) * self.replicas", "False"),),
    },
    "meshmuon.plan.batches": {
        "plan_batches": (
            ("(..., $item.treatment)", "(...,)"),
            ("max(1, $budget // max(1, $first.matrix_bytes))", "max(2, $budget // max(1, $first.matrix_bytes))"),
            ("min($largest, $chunk_size)", "max($largest, $chunk_size)"),
        ),
    },
    "meshmuon.plan.buffer_sizes": {
        "wave_sizes": (
            ("max(_elements($routes.gather_out), _elements($routes.scatter_in))", "_elements($routes.gather_out)"),
            ("0 if $mirrored else $goes", "0"),
            ("WaveSizes($shards, $staying_offset, ...)", "WaveSizes($shards, 0, ...)"),
        ),
    },
    "meshmuon.plan.calibration": {
        "Calibration.cost_model": (
            ("price(self.between)[0]", "price(self.inside)[0]"),
            ("price(self.exchange)[1]", "price(self.between)[1]"),
        ),
        "Calibration.cost_model.price": (
            ("$rate / $link.bytes_per_second", "$link.bytes_per_second / $rate"),
            ("$rate * $link.seconds", "$rate"),
        ),
    },
    "meshmuon.plan.rates": {
        "rate_at": (("$ratio**$share", "$ratio"),),
    },
    "meshmuon.doctor.exchanges": {
        "partner": (("(2 * $turn - $rank) % $last", "(2 * $turn + $rank) % $last"),),
    },
    "meshmuon.plan.cost": {
        "CostModel.sharing_pays": (
            ("2 * ($pieces - 1) / $pieces", "2 * $pieces / $pieces"),
            ("$crossings.fewest_apart($sharded) - $crossings.fewest($sharded)", "0"),
        ),
        "CostModel.owning": (
            ("2 * $sharded.size", "$sharded.size"),
            ("max(0, $between - $moved)", "0"),
        ),
    },
    "meshmuon.plan.footprint": {
        "_slots": (("$wave % $in_flight", "0"),),
        "Footprint.__init__": (("$sharded.size * $sharded.replicas", "$sharded.size"),),
        "Footprint.bytes_by_rank": (
            ("if $copies: ...", "if False: ..."),
            ("$copies or $gathered", "$copies"),
            ("$mine.get($at, 0) + $count * $size", "$mine.get($at, 0) + $size"),
        ),
    },
    "meshmuon.plan.nodes": {
        "Crossings.gathered": (("$sharded.size - $held", "$sharded.size"),),
        "Crossings.scattered": (("$sharded.size * $sharded.replicas", "$sharded.size"),),
        "Crossings.fewest": (("1 + $sharded.replicas", "2"),),
    },
    "meshmuon.plan.traffic": {
        "ExchangeBytes.reversed": (
            (
                "ExchangeBytes(self.received_inside, self.received_between, ...)",
                "ExchangeBytes(self.sent_inside, self.sent_between, ...)",
            ),
        ),
        "_Counter._add_inside": (("$mate != $at", "True"), ("$replica == $own_replica", "True")),
        "_Counter.wave": (("$sharded.size * $sharded.replicas", "$sharded.size"),),
    },
    "meshmuon.plan.timeline": {
        "_Walk.wait": (("max($now, $arrival)", "$now"),),
        "_Walk.send": (("max(self._links_free, $ready)", "$ready"), ("self._busy == 1.0", "False")),
    },
    "meshmuon.plan.prediction": {
        "_Seconds._exchange": (("add if self._on_cores else max", "add"),),
        "_Seconds._moved": (("map(max, $sent, $received)", "map(add, $sent, $received)"),),
    },
    "meshmuon.plan.order": {
        "pipeline_order.gather": (
            (
                "$any_left and $ahead and $gathered - $finished < $in_flight",
                "$any_left and $ahead and $gathered - $finished <= $in_flight",
            ),
            (
                "$any_left and $ahead and $gathered - $finished < $in_flight",
                "$any_left and $ahead and $gathered - computed < $in_flight",
            ),
        ),
        "pipeline_order": (("(Action.COMPUTE, $computed)", "(Action.COMPUTE, count - 1 - $computed)"),),
    },
    "meshmuon.plan.owners": {
        "assign_owners": (
            ("[$by_cost] if $by_cost == $by_choice else [$by_cost, $by_choice]", "[$by_cost]"),
            ("[$by_cost] if $by_cost == $by_choice else [$by_cost, $by_choice]", "[$by_choice]"),
            ("(-$tasks[$k].cost, $k)", "($tasks[$k].cost, $k)"),
            (
                "$by_cost = $sorted\n$by_choice = sorted($indices, key=lambda $k: (len($candidates), -$tasks[$k].cost, $k))",
                "$by_cost = $sorted\n$by_choice = $by_cost",
            ),
        ),
        "_Queues.least_loaded": (
            ("$load == self._loads[$rank]", "True"),
            (
                "while True:\n    $load, $crossing, $rank = $heap[0]\n    ...",
                "while True:\n    $load, $crossing, $rank = $heap[0]\n"
                "    if $load == self._loads[$rank]:\n        return max(rank for _, _, rank in $heap)\n    ...",
            ),
        ),
        "_assign": (("$loads[$rank] += $tasks[$k].cost", ""),),
        "lightest_possible": (("$sums[$k * $ranks + 1] - $sums[$k * $ranks - $k]", "$sums[$k + 1]"),),
    },
    "meshmuon.plan.plan": {
        "_replicas_share_owner": (("$options.replicas == 'share' and not $param.private", "$options.replicas == 'share'"),),
        "_tasks": (
            ("$sharded.replicas > 1", "True"),
            ("$sharded.separate_replicas", "$sharded.separate_replicas[:1]"),
        ),
        "Plan._check_wave": (("$task.owner not in $task.sharded.holdings", "False"),),
        "_check_copies": (("$holders != $expected or $overlap", "$overlap"),),
        "make_plan": (("replace($options, in_flight=$in_flight, max_peers=None)", "replace($options, max_peers=None)"),),
    },
    "meshmuon.plan.plan_data": {
        "PlanData.scatter_sends": (("$piece.holders", "$piece.holders[:1]"),),
        "PlanData.gather_sends": (("$source != $task.owner", "True"),),
        "PlanData.digest": (
            ("($param.name, ...)", "(...,)"),
            ("(..., $param.flops, ...)", "(..., ...)"),
            ("hashlib.sha256(repr(self.options).encode())", "hashlib.sha256()"),
            ("(..., $layout.mesh.ranks, ...)", "(..., ...)"),
            ("if not $param.private: ...", "if True: ..."),
            ("($task.owner, $task.wave)", "$task.owner"),
            ("($task.owner, $task.wave)", "$task.wave"),
        ),
    },
    "meshmuon.plan.routes": {
        "_by_peer": (
            ("($send.source, $send.target, $send.task)", "$send.task"),
            ("$send.task", "-$send.task"),
        ),
        "routes_of": (
            ("$sharded.sends_to($rank, $task.owner)", "True"),
            ("$task.sharded.piece_of($rank)", "$task.sharded.piece_of($rank) and $task.sharded.pieces[0]"),
        ),
    },
    "meshmuon.plan.waves": {
        "WaveCutter.__init__": (
            ("2 * $limits.budget", "4 * $limits.budget"),
            ("2 * $limits.budget", "$limits.budget"),
        ),
        "WaveCutter.cut": (("len($lane_of_wave) + $wave", "$wave"),),
        "_LaneCutter.__init__": (("$heaviest_cost / $worth_a_wave", "$worth_a_wave / $heaviest_cost"),),
        "_by_count": (("$position // $chunk_size", "$position // ($chunk_size + 1)"),),
        "_LaneCutter.within_budget": (("not self._fits($count)", "self._fits($count)"),),
        "_LaneCutter._fits": (("sum($sizes)", "max($sizes)"),),
        "_without_gaps": (("sorted(set($waves))", "range(max($waves) + 1)"),),
        "_within_bound": (
            ("max($total.values(), default=0) <= $bound", "True"),
            ("range($most - 1, 1, -1)", "range($most - 1, 2, -1)"),
            (
                "$total.update($lane.footprint.bytes_by_rank($cut, $in_flight))",
                "$total = Counter($lane.footprint.bytes_by_rank($cut, $in_flight))",
            ),
            ("($one_per_owner, 1)", "($one_per_owner, most)"),
            ("($one_per_owner, 1)", "(usual, 1)"),
            ("$lane.within_budget($count + 1 + $count // 8)", "min($lane.longest, $count + 1 + $count // 8)"),
        ),
        "": (("_STEEPEST = 4", "_STEEPEST = 40"),),
        "_LaneCutter.in_two_turns": (("2 * $turn + $position % 2", "$turn"),),
    },
}
