"""Mutants of what runs a plan: buffers, copies, waves, streams, exchanges."""

from __future__ import annotations

from . import Mutants

MUTANTS: Mutants = {
    "meshmuon.execute.build": {
        "RankProgramBuilder._gradient_reads": (
            ("$order[::-1]", "$order"),
            (
                "(_first_reads($reads, $order), _first_reads($reads, $order[::-1]))",
                "(_first_reads($reads, $order[::-1]), _first_reads($reads, $order[::-1]))",
            ),
            ("set($first).difference(*$reads)", "set()"),
            (
                "list(gradient_read_order($waves, len($local_batches), self.plan.options.in_flight))",
                "list(range($waves + len($local_batches)))",
            ),
            ("$freed_at_end |= $on_both.intersection($last_here[$k])", ""),
            ("GradientReads(sorted($on_both), $freed, self._filled_once)", "GradientReads((), $freed, self._filled_once)"),
        ),
        "RankProgramBuilder._wave": (
            ("offsets_of($routes.staying, $sizes.staying_offset)", "offsets_of($routes.staying)"),
            ("$k % self.plan.options.in_flight", "0"),
            ("[*offsets_of($routes.scatter_in), *$staying]", "[*offsets_of($routes.scatter_in)]"),
            ("[*offsets_of($routes.gather_out), *$staying]", "[*offsets_of($routes.scatter_in), *$staying]"),
            ("CopyPairs([], []) if $unrounded is None else CopyPairs([$shards], [$unrounded])", "CopyPairs([], [])"),
            ("[(offsets_of($routes.scatter_out), $results), ...]", "[(offsets_of($routes.scatter_out), $results)]"),
        ),
        "_tasks_held": (
            ("(*$routes.scatter_in, ...)", "(...,)"),
            ("(..., *$routes.staying)", "(...,)"),
        ),
        "RankProgramBuilder._reserve_buffers": (
            ("[$sizes[$k] for $k in $waves if $k % $slots == $slot]", "[$sizes[$waves[0]]]"),
        ),
        "RankProgramBuilder._local_ranges": (
            (
                "MatrixRange($last.param_index, $last.start, $matrix.stop, ...)",
                "MatrixRange($last.param_index, $matrix.start, $matrix.stop, ...)",
            ),
        ),
    },
    "meshmuon.execute.program_builder": {
        "_elements_by_peer": (
            (
                "$transfer.source if $transfer.target == $rank else $transfer.target",
                "$transfer.source if $transfer.target == $rank else $transfer.source",
            ),
        ),
        "rule_state_param": (("$step_param.matrix_set.rule_state_window", "None"),),
    },
    "meshmuon.execute.local_cuts": {
        "cut_out": (
            ("slice($last.start, $last.stop)", "slice(0, $last.stop - $last.start)"),
            ("$covered.unfold($dim, $last.size, $last.period)", "$covered.unfold($dim, $last.size, $last.size)"),
            ("$windows.movedim(-1, $dim + 1)", "$windows.movedim(-1, $dim)"),
        ),
        "cut_out_of_broadcast": (
            ("slice(None) if $size == 1 else $part", "slice(None)"),
            ("$taken.unsqueeze(len($cut))", "$taken"),
        ),
        "LocalWindow.cuts": (("($last.count, $last.size)", "($last.size, $last.count)"),),
        "_entry": (("slice($part.start, $part.stop, $part.period)", "slice($part.start, $part.stop)"),),
    },
    "meshmuon.execute.data_parallel": {
        "_AveragedBatch.without": (("$matrix.param_index not in $idle", "True"),),
        "_Wave.run": (("$matrix.param_index not in $idle", "True"),),
        "_DataParallelBuilder.build": (("GradientReads((), range(len(self.step_params)))", "GradientReads()"),),
    },
    "meshmuon.execute.elementwise": {
        "look_ahead": (
            ("torch.add($grad, $buffer, alpha=$momentum, out=$view)", "torch.add($grad, $buffer, alpha=1.0, out=$view)"),
            (
                "torch.add($grad, $buffer, alpha=$momentum, out=$view)",
                "torch.add($grad, $buffer, alpha=1 - $momentum, out=$view)",
            ),
            ("$view.copy_($grad).add_($buffer, alpha=$momentum)", "$view.copy_($grad).add_($buffer)"),
            ("torch._foreach_add_($views, $buffers, alpha=$momentum)", "torch._foreach_add_($views, $buffers)"),
            ("$view.copy_($buffer).mul_($momentum).add_($grad)", "$view.copy_($grad).add_($buffer, alpha=$momentum)"),
        ),
        "accumulate": (
            (
                "torch.add($grad, $buffer, alpha=$retain, out=$buffer)",
                "torch.add($grad, $buffer, alpha=1 - $retain, out=$buffer)",
            ),
            ("$buffer.mul_($retain).add_($grad)", "$buffer.add_($grad).mul_($retain)"),
            ("torch._foreach_mul_($buffers, $retain)", "torch._foreach_mul_($buffers, 1.0)"),
            ("$first_once if $dtype is $first else accumulates_once($dtype)", "$first_once"),
            (
                "$grad.dtype is $dtype and ($first_once if $dtype is $first else accumulates_once($dtype))",
                "$grad.dtype is $dtype",
            ),
        ),
        "fill_with_momentum": (
            ("accumulate(momentum_portion, grad_portion, $retain)", "pass"),
            ("not adds_alike($view.dtype, $view.dtype)", "False"),
        ),
        "_fill_large": (
            ("$view.copy_($buffer)", "pass"),
            ("torch.add($grad, $buffer, alpha=momentum, out=$view)", "torch.add($grad, $buffer, alpha=1.0, out=$view)"),
            ("torch.add($grad, $buffer, alpha=retain, out=$buffer)", "pass"),
            ("$buffer.mul_(retain).add_($grad)", "torch.add($grad, $buffer, alpha=retain, out=$buffer)"),
        ),
        "_fill_from_stacks": (
            ("torch._foreach_copy_(momenta[$start:$stop], $members)", "pass"),
            ("torch._foreach_copy_(views[$start:$stop], $to_copy)", "pass"),
        ),
        "apply": (
            ("-$rate", "$rate"),
            ("torch._foreach_mul_(params, $decay)", "pass"),
            ("torch._foreach_mul_(param_portion, $factor)", "pass"),
            ("[$param.mul_($factor)]", "[$param]"),
            ("($param * $update).mul_($rate) >= 0", "($param * $update).mul_($rate) <= 0"),
            ("($param * $update).mul_($rate)", "$param * $update"),
            ("torch.where($same_way, $decayed, $param, out=$decayed)", "torch.where($same_way, $param, $decayed, out=$decayed)"),
            ("all_add_alike($params, $updates) if $alike is None else $alike", "True"),
            ("($param * $update).mul_($rate) >= 0", "($param * $update).mul_($rate) > 0"),
        ),
        "_apply_to_stacks": (
            ("$stacked_params.mul_($decay)", "$stacked_params"),
            ("torch._foreach_copy_($params[$start:$stop], $members)", "pass"),
        ),
        "_subtract_in_two": (("torch._foreach_add_($updates, 0.0)", "pass"),),
        "adds_alike": (("(torch.equal(...) for $size in _TRIAL_SIZES)", "(torch.equal(...) for $size in (8,))"),),
    },
    "meshmuon.execute.fused_momentum": {
        "fill_large": (
            ("$momentum not in (None, $retain)", "False"),
            ("not $retain", "False"),
        ),
        "_fits": (("$size % VECTOR_MULTIPLE == 0", "True"), ("$tensor.is_contiguous()", "True")),
        "_fill_whole_vectors": (("$view.fill_(-0.0)", "$view.fill_(0.0)"), ("$view.fill_(-0.0)", "pass")),
    },
    "meshmuon.execute.one_pass": {
        "apply_to_large": (
            ("$size % VECTOR_MULTIPLE", "0"),
            ("torch.get_num_threads() > 1", "False"),
            ("$decay == 0", "False"),
        ),
    },
    "meshmuon.execute.portions": {
        "portions_of_lists": (("start < k", "True"),),
        "portions_of_tensors": (("all(...)", "True"),),
        "cuts_within": (("range(0, $shape[0], $step)", "range(0, $shape[0] - 1, $step)"),),
    },
    "meshmuon.execute.small_stack": {
        "stacked_view": (("$view.storage_offset() != $start + $k * $size", "False"),),
        "SmallStacks.for_other_views": (("$stacks._stacked_views = None", "pass"),),
    },
    "meshmuon.execute.rounding": {
        "apply_rounded": (
            ("$change.mul_($rate).add_(0.0)", "$change.mul_($rate)"),
            ("torch.ge(..., 0, out=$same_way)", "torch.gt(..., 0, out=$same_way)"),
            ("isinstance($decay, Tensor) or $decay != 1.0", "isinstance($decay, Tensor)"),
            ("$change.dtype != torch.float32", "False"),
            ("$words.part($cut)", "$words"),
            ("chunks_of($param.shape, $device) if $param.numel() else ()", "[()]"),
        ),
        "round_stochastically": (
            ("$numbers.masked_fill_($is_nan, math.nan)", "pass"),
            ("_shift_right($noise, 16, 65535, $shifted)", "_shift_right($noise, 16, 32767, $shifted)"),
            ("_shift_right($noise, 15, 131071, $shifted)", "$noise.bitwise_right_shift(15)"),
            ("$noise.mul_(_SPREAD_2)", "pass"),
        ),
        "RandomWords.of": (
            ("$count * _GAMMA", "_GAMMA"),
            ("_mixed(_wrapped($seed + _GAMMA))", "0"),
            ("_mixed($key) + $count * _GAMMA", "$count * _GAMMA"),
        ),
        "elements_held": (("math.prod($shape[$dim + 1:-1])", "math.prod($shape[$dim + 1:])"),),
        "advance_counters": (
            ("~$skip_mask", "$skip_mask"),
            ("dict.fromkeys($counters)", "$counters"),
        ),
    },
    "meshmuon.execute.step_param": {
        "StepParam.random_words": (("self.elements.part($cut)", "self.elements"),),
    },
    "meshmuon.execute.executor": {
        "Executor.run": (
            ("$program.failures.clear()", ""),
            ("$program.around_all.free_gradients($step_params)", ""),
            ("$program.around_all.accumulate_momentum($step_params, $idle)", ""),
            ("$streams.main_waits($streams.side_mark())", ""),
            ("skipped_wave() if $params <= $idle else $run", "$run"),
        ),
    },
    "meshmuon.execute.ortho_batch": {
        "OrthoBatch.is_idle": (("bool($idle) and self._param_set <= $idle", "bool($idle) and bool(self._param_set & $idle)"),),
        "OrthoBatch.orthogonalise": (("if $idle:\n    self._overwrite_idle($idle)", ""),),
        "seen_by_rule": (
            ("not $one_by_one", "True"),
            ("$matrices.mT if $flipped else $matrices", "$matrices"),
        ),
        "apply_rule": (
            (
                "for $matrices, $_ in $seen:\n    $rule.before($matrices)\n$orthogonalise()",
                "for $matrices, $_ in $seen:\n"
                "    pass\n"
                "$orthogonalise()\n"
                "for $matrices, $_ in $seen:\n"
                "    $rule.before($matrices)",
            ),
        ),
    },
    "meshmuon.execute.pipeline": {
        "guarded": (
            (
                "try: ...\nexcept TransportError:\n    raise\nexcept Exception as $error: ...",
                "try: ...\nexcept Exception as $error: ...",
            ),
        ),
    },
    "meshmuon.execute.rule_state": {
        "rule_state_transfers": (
            ("[$rank for $rank in $piece.holders if $rank in $task.sharded.holdings]", "list($piece.holders)"),
            (
                "$gathers.append(PieceTransfer($task_index, $source, $task.owner, $piece))",
                "$gathers.extend(PieceTransfer($task_index, holder, $task.owner, $piece) for holder in holders)",
            ),
            ("$task.owner if $task.owner in $holders else $holders[0]", "$holders[0]"),
        ),
        "_exchange": (("$piece.cols if $flipped else $piece.rows", "$piece.rows"),),
        "RuleStateExchange.finish_scatter": (("store_rule_state(self.received_shards, $step_params, $idle)", "pass"),),
        "_without": (("[$shard for $shard in $shards if $shard.param_index not in $idle] if $idle else $shards", "shards"),),
    },
    "meshmuon.execute.shard_views": {
        "_UniformViews.without": (("$shard.param_index not in $idle", "True"),),
        "GradientReads.accumulate_momentum": (("k not in idle", "True"), ("k not in self._filled_once", "True")),
        "ShardViews.fill": (("$settings.nesterov", "not $settings.nesterov"),),
        "ShardViews.apply": (
            ("$settings.rate * $factor", "$settings.rate"),
            ("$first.matrix_set.lr_shape", "$first.matrix_set.lr_shape[::-1]"),
        ),
        "free_gradients": (("$step_param.settings.free_grad", "not $step_param.settings.free_grad"),),
    },
    "meshmuon.execute.strided_copies": {
        "_runs": (
            ("len($run) == 1 or $gap == $step", "True"),
            ("$block.kind == $last.kind", "True"),
            ("min($gap) > 0", "True"),
        ),
        "_view": (("$memory.storage_offset() + $offset", "$offset"),),
        "strided_views": (("min($by_stage, $by_buffer, key=len)", "$by_buffer"),),
        "blocks_of": (("$one.offset + $top * $width", "$one.offset + row * $width"),),
    },
    "meshmuon.execute.wave": {
        "Wave.run": (
            ("self.gradient_reads.accumulate_momentum($step_params, $idle)", ""),
            (
                "with $observer.phase('gather', waits=True):\n    $gather.wait()",
                "with $observer.phase('gather', waits=True):\n    pass",
            ),
            (
                "$scatter.wait()\nif $staged:\n    self.stage.to_host()",
                "if $staged:\n    self.stage.to_host()",
            ),
            ("self.rounding.run()", ""),
            ("$streams.beside($ready, self.gradient_reads.gradients($step_params, $idle))", "$streams.beside($ready)"),
        ),
    },
    "meshmuon.execute.relayed": {
        "RelayedPending.wait": (
            ("$buffers.to_forward.run()", ""),
            ("$buffers.to_received.run()", ""),
        ),
        "RelayedExchange.buffers": (("{**own, **ins[0]}", "own"),),
    },
    "meshmuon.plan.relays": {
        "Relays.relays": (
            ("near[relay_for(target, len(near))]", "near[0]"),
            ("far[relay_for(source, len(far))]", "far[0]"),
        ),
        "_Edges.add": (("$source != $target", "True"),),
        "relay_for": (("$total += $digit", "$total = $digit"),),
    },
    "meshmuon.plan.peers": {
        "PeerCounter._peers": (("len($senders.union(*$held))", "len($senders)"),),
    },
    "meshmuon.plan.relay_bytes": {
        "_RelayedBytes.hops": (("map(sub, self.arrived, self.own_arrived)", "self.arrived"),),
        "_RelayCounter._add": (
            ("$relayed.forwarded[$at] -= $held * $itemsize", ""),
            ("$relayed.arrived[$at] -= $held * $itemsize", ""),
        ),
    },
    "meshmuon.transport.agreement": {
        "PendingVerdict.__init__": (("-$vote.fingerprint", "$vote.fingerprint"),),
        "_ReducedMaximum.__init__": (("dist.ReduceOp.MAX", "dist.ReduceOp.MIN"),),
    },
    "meshmuon.transport.channels": {
        "_over_store": (("($store.add($key, 1) - 1) // $size", "0"),),
    },
    "meshmuon.transport.collectives": {
        "broadcast": (("$flat is not $tensor", "False"),),
    },
    "meshmuon.transport.dissemination": {
        "distances": (
            ("($size - 1).bit_length()", "$size.bit_length()"),
            ("1 << $k", "1 + $k"),
        ),
        "told_in_round": (
            ("min($distance, $size - $distance)", "$distance"),
            ("($position - $j) % $size", "($position + $j) % $size"),
        ),
    },
    "meshmuon.transport.exchange": {
        "Exchange.start": (
            (
                "dist.all_to_all_single($received, $sent, $received_splits, $sent_splits, ...)",
                "dist.all_to_all_single($received, $sent, $sent_splits, $received_splits, ...)",
            ),
        ),
    },
    "meshmuon.transport.groups": {
        "_new_group": (
            ("sum($name.startswith($base) for $name in group_names())", "0"),
            ("new_named_group(f'{$base} {$known}', ...)", "new_named_group(f'{$base} {len(group_names())}', ...)"),
        ),
        "_fitting": (
            ("dist.get_process_group_ranks($group) == list($ranks)", "dist.get_process_group_ranks($group) != list($ranks)"),
        ),
    },
    "meshmuon.transport.host_channel": {
        "HostChannel._connect": (
            ("($position - $distance) % $size", "($position + $distance) % $size"),
            ("($position + $distance) % $size", "($position - $distance) % $size"),
        ),
        "HostChannel._begin": (("self._started += 1", ""),),
        "HostChannel.check_header": (("($kind, $sent_in, $count) != $expected", "False"),),
        "PendingMaximum._run": (("tuple(map(max, self._words, $heard))", "$heard"),),
        "_forget_in_fork": (("$channel._release()", "pass"),),
    },
    "meshmuon.transport.sockets": {
        "Connecting._hear_hello": (
            ("hmac.compare_digest($token, self._listener.door.token)", "True"),
            ("$known and $source in self._sources and $source not in self.incoming", "$known and $source not in self.incoming"),
        ),
        "Connecting._hear_answer": (("_ANSWER.unpack($attempt.buffer) != (_MAGIC, $proof)", "False"),),
    },
    "meshmuon.transport.norms": {
        "reduce_norm": (("$difference.abs()", "$difference"),),
    },
    "meshmuon.device": {
        "replay_for": (("$graphs and $device.type == 'cuda'", "$graphs or $device.type == 'cuda'"),),
        "CudaReplay.__call__": (
            ("self._graph = $graph", ""),
            ("return", ""),
        ),
        "CudaStreams.beside": (
            ("self._side.wait_event($after)", "pass"),
            ("$tensor.record_stream(self._side)", "pass"),
        ),
        "CudaStreams.side_mark": (("self._side", "torch.cuda.current_stream(self._device)"),),
    },
    "meshmuon.torch_compat": {
        "new_named_group": (("list($ranks).index(dist.get_rank())", "0"),),
        "mesh_slices": (("$layout.remap_to_tensor($rank_map).flatten(1)", "mesh.mesh.flatten()[None]"),),
        "cut_in_mesh_order": (("list($axes) == sorted($axes)", "True"),),
        "same_layout": (("$orders[0] == $orders[1]", "True"),),
        "mark_overwritten": (("torch.autograd.graph.increment_version($tensors)", "pass"),),
        "FSDP2Weights.gathered_again": (("$param.sharded_state is not self._unsharded", "True"),),
    },
}
