"""Mutants of what a step reads, checks and agrees on: hyperparameters, state, plans that all ranks share."""

from __future__ import annotations

from . import Mutants

MUTANTS: Mutants = {
    "meshmuon.params.lr": {
        "_match_rms_adamw": (
            ("max($rows, $cols)", "min($rows, $cols)"),
            ("max($rows, $cols)", "$rows"),
            ("math.sqrt(max($rows, $cols))", "max($rows, $cols)"),
            ("0.2 * math.sqrt(max($rows, $cols))", "0.21 * math.sqrt(max($rows, $cols))"),
        ),
        "_original": (
            ("$rows / $cols", "$cols / $rows"),
            ("math.sqrt(max(1.0, $rows / $cols))", "max(1.0, $rows / $cols)"),
        ),
        "_spectral": (("$rows / $cols", "$cols / $rows"),),
        "_factor_of_function": (("$rule($rows, $cols)", "$rule($cols, $rows)"),),
        "lr_factor": (("_RULES[$rule]($rows, $cols)", "_RULES[$rule]($cols, $rows)"),),
    },
    "meshmuon.params.rules": {
        "NorMuon.after": (
            ("$squares * (1 - self.beta2)", "$squares"),
            ("$update.mul_($before / $after / $root)", "$update.div_($root)"),
            ("$before / $after / $root", "$before / $after / memory"),
            ("$squares / $root.square()", "$squares / $root"),
            ("$squares.square().div_(max(1, $update.size(-1)))", "$squares.square()"),
        ),
        "MuonPlus.after": (("min($update.size(-2), $update.size(-1))", "max($update.size(-2), $update.size(-1))"),),
        "MuonEq.before": (
            ("$norm = torch.linalg.vector_norm(...)\n$momentum.div_($norm.masked_fill_($norm == 0, 1.0))", "$norm = 1.0"),
        ),
    },
    "meshmuon.optim.adamw": {
        "_step": (
            ("adamw(..., beta1=$beta1, beta2=$beta2)", "adamw(..., beta1=$beta2, beta2=$beta2)"),
            ("float($group['weight_decay'])", "0.0"),
            ("$group['maximize']", "False"),
            ("adamw_eps($group)", "1e-8"),
            ("local_part($state[$key]).stride() != local_part($param).stride()", "False"),
        ),
        "_step_stochastically": (
            ("$gradient.neg_()", "pass"),
            ("float($group['weight_decay'])", "0.0"),
            ("(1 - $beta2**$count) ** 0.5", "1 - $beta2**$count"),
            ("$words.part($cut)", "$words"),
        ),
        "adamw_step": (("advance_counters($counters, $skip_mask)", "pass"),),
    },
    "meshmuon.optim.collect": {
        "ParamRecord.still_holds": (
            ("self.metadata == metadata_of($named.param)", "True"),
            ("self.recipe is $recipe", "True"),
            ("self.named.name == $named.name", "True"),
            ("self.named.param_group is $named.param_group", "True"),
        ),
        "Collector.check": (
            ("$changed = True\nself._cached_step_params = (None, [])", "$changed = True"),
            ("if self.without_state:\n    self._cached_step_params = (None, [])", "pass"),
            ("self.has_grad is not self._checked_has_grad", "False"),
            ("[$k for $k in $all if not self._has_all_state($k, $states)]", "[]"),
        ),
        "Collector._check_state": (("self.has_grad[$k] and $k not in $checked", "$k not in $checked"),),
        "Collector.step_params": (
            ("$k in $decision.zeros", "False"),
            ("all(map($keeps, range(len($step_params))))", "True"),
        ),
        "Collector._has_step_params": (("$cached_for is $decision.plan", "$cached_for is not None"),),
        "Collector._current_step_params": (
            ("$settings[$one.group_index, $one.param.device]", "$one.settings"),
            ("$k not in $decision.idle", "True"),
        ),
        "Collector.ready_step_params": (("$decision.zeros or not self._has_step_params($decision)", "$decision.zeros"),),
        "Collector.release_state": (
            ("$step_param.momentum_buffer = $step_param.rule_state = $step_param.zeros = $step_param.counter = None", "pass"),
            (
                "$step_param.momentum_buffer = $step_param.rule_state = $step_param.zeros = $step_param.counter = None",
                "$step_param.momentum_buffer = $step_param.rule_state = None",
            ),
        ),
        "Collector._new_step_param": (("dict($states.get($param, {})) if $idle else $states[$param]", "$states[$param]"),),
    },
    "meshmuon.optim.plan_inputs": {
        "recipe_of": (
            ("$group['ns_steps']", "5"),
            ("$group['scheme']", "'polar_express'"),
        ),
    },
    "meshmuon.optim.step_settings": {
        "settings_of": (
            ("1 - $lr * float($group['weight_decay'])", "1 + $lr * float($group['weight_decay'])"),
            ("$lr * float($group['weight_decay'])", "float($group['weight_decay'])"),
            ("1 - $lr * float($group['weight_decay'])", "1.0"),
            ("-$lr if $group['maximize'] else $lr", "$lr"),
            ("-$lr if $group['maximize'] else $lr", "$lr if $group['maximize'] else -$lr"),
            ("$group['nesterov']", "True"),
            ("float($group['momentum'])", "0.95"),
            ("$group['adjust_lr_fn']", "'match_rms_adamw'"),
            ("$group['none_grad']", "True"),
        ),
    },
    "meshmuon.optim.dist_muon": {
        "DistMuon._drop_foreign_state": (
            ("self._complete and not $stepped", "self._complete or not $stepped"),
            ("self._complete and not $stepped", "not $stepped"),
            ("$param_index not in $idle", "True"),
        ),
        "DistMuon.consolidate": (("self._dividing", "self._executor.plan"),),
    },
    "meshmuon.optim.group_snapshot": {
        "GroupSnapshot.still_holds": (
            ("self._group is $group", "True"),
            ("self._recipe is $recipe", "True"),
            ("all(map(operator.is_, $params, self.$own))", "True"),
            ("self.$names == $group['param_names']", "True"),
            ("all(map(operator.eq, self._metadata_of($params), self.$metadata))", "True"),
        ),
        "GroupSnapshot.same_gradients": (("$now is None or $now == $accepted", "True"),),
        "GroupSnapshot.accept_gradients": (("$accepted if $now is None else $now", "$now"),),
        "GroupSnapshot.same_state": (
            ("all(map(operator.eq, map(tuple, $entries), self.$keys))", "True"),
            ("all($value is $known() for $value, $known in $pairs)", "True"),
        ),
    },
    "meshmuon.optim.muon": {
        "Muon.__init__": (
            ("momentum: $type = 0.95", "momentum: $type = 0.9"),
            ("weight_decay: $type = 0.1", "weight_decay: $type = 0.01"),
            ("ns_steps: $type = 5", "ns_steps: $type = 6"),
            ("nesterov: $type = True", "nesterov: $type = False"),
        ),
    },
    "meshmuon.optim.offload": {
        "Offload._offload": (("self.settle()", ""),),
    },
    "meshmuon.state.param_state": {
        "restore": (
            ("'step' in $entry and not $group['use_muon']", "'step' in $entry"),
            ("(MOMENTUM, RULE_STATE, COUNTER)", "(MOMENTUM, RULE_STATE)"),
        ),
        "_check_counter": (("int($value[1]) < 0", "False"),),
    },
    "meshmuon.agree.differences": {
        "other_optimizer": (("$place.lookalikes == $other_place.lookalikes", "True"),),
    },
    "meshmuon.agree.identity": {
        "Pairing.joined": (("Pairing($number) if $number else self", "self"),),
        "register": (("(*$copied, next(_numbers))", "(next(_numbers),)"),),
    },
    "meshmuon.agree.link": {
        "Home.check_connected": (("self._world() is None or self._world() is not current_world()", "False"),),
    },
    "meshmuon.agree.local_planner": {
        "LocalPlanner.misplaced_shard": (
            ("$expected == $plan_input.local_shape", "math.prod($expected) == math.prod($plan_input.local_shape)"),
        ),
        "LocalPlanner.plan": (
            (
                "[$member for $index, $parts in $all for $part, $planned in enumerate($parts) if $index in $members]",
                "[$member for $index, $parts in $all for $part, $planned in enumerate($parts)]",
            ),
        ),
        "LocalPlanner.gradients": (("any($column)", "all($column)"),),
        "LocalPlanner.propose": (
            ("$flag and not $here[$index]", "False"),
            (
                "frozenset($position for $position, ($index, $_) in enumerate($decision.planned_parts) if not $active[$index])",
                "frozenset()",
            ),
            ("(self._settings.path, $flags, $by_rank)", "($flags, $by_rank)"),
            ("(self._settings.path, $flags, $by_rank)", "(self._settings.path, $by_rank)"),
            ("(self._settings.path, $flags, $by_rank)", "(self._settings.path, $flags)"),
        ),
        "Proposal.fingerprint": (("(self.decision.plan.digest, *self.also_compared)", "self.also_compared"),),
    },
    "meshmuon.agree.planned_set": {
        "PlannedSet.covering": (
            ("not $leaving and $active <= self.indices", "not $leaving"),
            ("self.indices - $leaving | $active", "$active"),
            ("self._not_worth_keeping() - $active", "self._not_worth_keeping()"),
            ("self._not_worth_keeping() - $active", "frozenset[int]()"),
        ),
        "PlannedSet.after_step": (("self.idle_since.get($index, self.clock)", "self.clock"),),
        "PlannedSet.merged": (
            ("min($steps)", "max($steps)"),
            ("set(self.indices.difference($shared))", "set()"),
        ),
        "PlannedSet._not_worth_keeping": (
            ("$begin <= $long_ago", "$begin < $long_ago"),
            ("sum($flops[$index] for $index in $candidates) >= IDLE_SHARE * $total", "True"),
            ("$leaving |= $candidates", "$leaving |= long_idle"),
        ),
    },
    "meshmuon.agree.planner": {
        "Planner._plan": (
            ("self._flags_by_rank.get(current_rank()) != $local.shared_flags($has_grad)", "False"),
            ("self._flags_by_rank.get(current_rank()) != $local.shared_flags($has_grad)", "True"),
        ),
        "Planner._propose": (
            ("$before.indices != $planned.indices", "True"),
            ("$before.indices != $planned.indices", "False"),
        ),
        "Planner._decision": (("self._count_step()", ""),),
        "Planner.confirm": (("self._count_step()", ""),),
        "Planner._plan_together": (
            ("self._planned_next.merged(local.shared, $idle_steps)", "self._planned_next"),
            ("len({tuple($planned) for $of_rank in $idle_steps}) > 1", "False"),
        ),
        "Planner._fingerprint": (
            (
                "(self._proposal.fingerprint, $hyperparameters, $known, ...)",
                "(self._proposal.fingerprint, $hyperparameters, ...)",
            ),
            (
                "(self._proposal.fingerprint, $hyperparameters, $known, $without_state, $nodes)",
                "(self._proposal.fingerprint, $hyperparameters, $known, $nodes)",
            ),
            (
                "(self._proposal.fingerprint, $hyperparameters, $known, $without_state, $nodes)",
                "(self._proposal.fingerprint, $hyperparameters, $known, $without_state)",
            ),
        ),
        "Planner._refuse_lost_state": (("any($flags)", "all($flags)"),),
        "Planner._refuse_other_optimizers": (("$steps - 1", "$steps"),),
    },
    "meshmuon.agree.state_presence": {
        "StatePresence.begun": (("bool(local_part($value).count_nonzero())", "True"),),
    },
    "meshmuon.qk_clip.clip": {
        "QKClip.apply": (("$k == 0", "True"),),
    },
    "meshmuon.checkpoint": {
        "_converted_state": (("1 - _momentum($name, $saved)", "1"),),
    },
}
