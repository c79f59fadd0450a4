"""Mutations written by hand: slips that a reader of the maths would make, one line each, all to be caught.

Each is (file, old text, new text); the old text must be in the file exactly once, which ``test_curated.py`` checks.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CURATED", "EQUIVALENT", "Curated", "Equivalent"]


class Curated(NamedTuple):
    file: str
    old: str
    new: str


class Equivalent(NamedTuple):
    """A systematic mutation that changes nothing that a test could or should see, and why."""

    file: str
    line: str  # the line before the mutation, stripped
    reason: str
    mutation: str = ""  # only this change, "a -> b"; empty for every change of the line


_SCHEMES = "meshmuon/ortho/schemes.py"
_REMEZ = "meshmuon/ortho/remez.py"
_ITERATION = "meshmuon/ortho/iteration.py"
_BLOCKS = "meshmuon/ortho/blocks.py"
_COST = "meshmuon/ortho/cost.py"
_ENTRY = "meshmuon/ortho/newton_schulz.py"
_PRODUCTS = "meshmuon/ortho/kernels/products.py"
_WORKSPACE = "meshmuon/ortho/workspace.py"
_ALIGNED = "meshmuon/ortho/aligned.py"
_LR = "meshmuon/params/lr.py"
_MUON = "meshmuon/optim/muon.py"
_ADAMW = "meshmuon/optim/adamw.py"
_CHECKPOINT = "meshmuon/checkpoint.py"
_COLLECT = "meshmuon/optim/collect.py"
_RULES = "meshmuon/params/rules.py"
_STAGE = "meshmuon/execute/ortho_batch.py"
_MEMORY = "meshmuon/execute/rule_state.py"
_PLANNING = "meshmuon/agree/planner.py"
_SEEN = "meshmuon/optim/group_snapshot.py"
_DIFFERENCES = "meshmuon/agree/differences.py"
_IDENTITY = "meshmuon/agree/identity.py"
_KEEPING = "meshmuon/agree/state_presence.py"
_LINK = "meshmuon/agree/link.py"
_LOCAL_PLANNER = "meshmuon/agree/local_planner.py"
_PARTS = "meshmuon/execute/shard_views.py"
_ELEMENTWISE = "meshmuon/execute/elementwise.py"
_BUILD = "meshmuon/execute/build.py"
_COPIES = "meshmuon/execute/strided_copies.py"
_PIPELINE = "meshmuon/execute/pipeline.py"
_WAVE = "meshmuon/execute/wave.py"
_EXECUTOR = "meshmuon/execute/executor.py"
_CUTS = "meshmuon/layout/cuts.py"
_LAYOUT = "meshmuon/layout/layout.py"
_SPREAD = "meshmuon/layout/sharded_matrix.py"
_PLAN = "meshmuon/plan/plan.py"
_OWNERS = "meshmuon/plan/owners.py"
_WAVES = "meshmuon/plan/waves.py"
_ROUTES = "meshmuon/plan/routes.py"
_BUFFERS = "meshmuon/plan/buffers.py"
_FOOTPRINT = "meshmuon/plan/footprint.py"
_PLAN_COST = "meshmuon/plan/cost.py"
_EXCHANGE = "meshmuon/transport/exchange.py"
_AGREEMENT = "meshmuon/transport/agreement.py"
_GROUPS = "meshmuon/transport/groups.py"
_COMPAT = "meshmuon/torch_compat.py"
_BATCHES = "meshmuon/plan/batches.py"
_INSIDE = "meshmuon/matrices/matrix_set.py"
_DEVICE = "meshmuon/device.py"

CURATED = (
    # Coefficients: one digit, one sign, one ignored argument
    Curated(_SCHEMES, "Quintic(3.4445, ", "Quintic(3.4455, "),
    Curated(_SCHEMES, "3.4445, -4.7750, 2.0315", "3.4445, -4.7760, 2.0315"),
    Curated(_SCHEMES, "-4.7750, 2.0315", "-4.7750, 2.0314"),
    Curated(_SCHEMES, "3.4445, -4.7750", "3.4445, 4.7750"),
    Curated(_SCHEMES, "2.0315),) * steps", "2.0315),) * 5"),
    Curated(_SCHEMES, "lambda steps: keller(steps)", "lambda steps: keller()"),
    Curated(_SCHEMES, "lambda steps: polar_express(steps=steps)", "lambda steps: polar_express()"),
    Curated(_SCHEMES, "for step in range(steps):", "for step in range(5):"),
    Curated(_SCHEMES, "l: float = 1e-3", "l: float = 2e-3"),
    Curated(_SCHEMES, "safety: float = 0.01", "safety: float = 0.02"),
    Curated(_SCHEMES, "cushion: float = 0.02", "cushion: float = 0.03"),
    Curated(_SCHEMES, "if step < steps - 1:", "if step < steps:"),
    Curated(_SCHEMES, "stretched(1 + safety)", "stretched(1 - safety)"),
    Curated(_SCHEMES, "quintic.stretched(1 + safety)", "quintic.scaled(1 + safety)"),
    Curated(_SCHEMES, "2 / (quintic(low) + quintic(high))", "1 / quintic(high)"),
    Curated(_SCHEMES, "max(low, cushion * high)", "low"),
    Curated(_SCHEMES, "max(low, cushion * high)", "max(low, cushion)"),
    Curated(_SCHEMES, "high = 2 - low", "high = 1.0"),
    Curated(_SCHEMES, "        for quintic in self.steps:", "        for quintic in reversed(self.steps):"),
    Curated(_SCHEMES, "quintics *= steps", "quintics *= 5"),
    Curated(_REMEZ, "_LIMIT = (15 / 8, -10 / 8, 3 / 8)", "_LIMIT = (15 / 8, -10 / 8, 3 / 7)"),
    Curated(_REMEZ, "(self.b + square * self.c)", "(self.b - square * self.c)"),
    Curated(_REMEZ, "self.b / factor**3", "self.b / factor**2"),
    Curated(_REMEZ, "self.c / factor**5", "self.c / factor**3"),
    Curated(_REMEZ, "self.b * factor, self.c * factor", "self.b * factor, self.c"),
    Curated(_REMEZ, "(3 * x * x + 9 * x + 8) / 8", "(3 * x * x + 8 * x + 8) / 8"),
    Curated(_REMEZ, "(-1.0) ** index", "1.0"),
    Curated(_REMEZ, "d1 / radius - 2 * d2 * centre", "d1 / radius - d2 * centre"),
    Curated(_REMEZ, "d0 - d1 * centre / radius", "d0 + d1 * centre / radius"),
    Curated(_REMEZ, "half < 1e-9", "half < 1e-4"),
    Curated(_REMEZ, "<= 1e-15 * error", "<= 1e-4 * error"),
    Curated(_REMEZ, "(high - low) / (high + low)", "(high - low) / 2"),
    # The iteration
    Curated(_ITERATION, "products.general(quadratic, factor, spare)", "products.general(factor, quadratic, spare)"),
    Curated(
        _ITERATION, "return products.general(quadratic, x, target, x, beta=a)", "return products.general(quadratic, x, target, x)"
    ),
    Curated(
        _ITERATION, 'scratch.square("quadratic"), gram, alpha=c, beta=b)', 'scratch.square("quadratic"), gram, alpha=b, beta=c)'
    ),
    Curated(_ITERATION, "gram, place, gram, alpha=c, beta=b)", "gram, place, gram, alpha=c)"),
    Curated(_ITERATION, ".diagonal(dim1=1, dim2=2).add_(a)", ".diagonal(dim1=1, dim2=2).sub_(a)"),
    Curated(_ITERATION, "products.symmetric(half_step, quadratic", "products.symmetric(half_step, half_step"),
    Curated(_ITERATION, "if index < len(steps) - 1:", "if index < len(steps) - 2:"),
    Curated(_ITERATION, "x, spare, start = moved, x, start + length", "x, spare, start = moved, x, start"),
    Curated(_ITERATION, "x, spare, start = moved, x, start + length", "x, start = moved, start + length"),
    Curated(_ITERATION, "    scale.sqrt_()\n", ""),
    Curated(_ITERATION, "    gram.div_(scale)\n", ""),
    Curated(_ITERATION, "scale.clamp_(min=max(torch.finfo(gram.dtype).tiny, torch.finfo(scale.dtype).tiny))", "scale.add_(1e-7)"),
    Curated(_ITERATION, "clamp_(min=limits.tiny", "clamp_(min=1e-8"),
    Curated(_ITERATION, "min=limits.tiny, max=limits.max", "min=limits.tiny"),
    Curated(_ITERATION, "lowest.neg_()", "lowest"),
    Curated(_ITERATION, "math.sqrt(batch.size(2))", "1.0"),
    Curated(_ITERATION, "if x is not result:", "if x is result:"),
    Curated(_ITERATION, "if index == 0:\n            _normalise", "if index > 0:\n            _normalise"),
    Curated(_ITERATION, "wide = 1 if dtype == result_dtype else 2", "wide = 1"),
    Curated(_ITERATION, "if max(blocks) > 1 else _SQUARES[:2]", "if max(blocks) > 5 else _SQUARES[:2]"),
    Curated(_ITERATION, "if batch.size(1) > batch.size(2) else batch", "if batch.size(1) < batch.size(2) else batch"),
    Curated(
        _ENTRY, "if dtype == torch.float64:\n        return dtype", "if dtype == torch.float64:\n        return torch.float32"
    ),
    Curated(_ENTRY, "return torch.bfloat16 if device.type", "return torch.float16 if device.type"),
    Curated(
        _ENTRY,
        'if form == "gram":\n        return gram_blocks(scheme, dtype)',
        'if form == "gram":\n        return standard_blocks(scheme)',
    ),
    Curated(_ENTRY, "result.copy_(call_scheme(scheme, batch))", "pass"),
    Curated(_BLOCKS, "_OVERSHOOT = 1.05", "_OVERSHOOT = 3.0"),
    Curated(_BLOCKS, "noise = torch.finfo(dtype).eps / 2", "noise = 2.0**-25"),
    Curated(_BLOCKS, "_OVERSHOOT * exact.overshoot and outcome", "_OVERSHOOT * exact.overshoot or outcome"),
    Curated(_BLOCKS, "(safe[blocks].deviation, blocks)", "blocks"),
    Curated(_BLOCKS, "return min(candidates, key", "return max(candidates, key"),
    Curated(
        _BLOCKS,
        "candidates = (standard_blocks(scheme), gram_blocks(scheme, dtype))",
        "candidates = (gram_blocks(scheme, dtype),)",
    ),
    Curated(_COST, "2 * (stop - start) * stop * k", "2 * (stop - start) * n * k"),
    Curated(_COST, "symmetric_flops(n, m) + 2 * n * n * m", "symmetric_flops(n, m) + n * n * m"),
    Curated(_COST, "(3 * steps - 2 * count)", "(3 * steps - count)"),
    Curated(_COST, "n, m = min(rows, cols), max(rows, cols)", "n, m = rows, cols"),
    Curated(_PRODUCTS, "out[:, :start, start:stop].copy_(panel[:, :, :start].mT)", "pass"),
    Curated(_PRODUCTS, "part = None if addend is None else addend[:, start:stop, :stop]", "part = None"),
    Curated(
        _PRODUCTS,
        "torch.baddbmm(addend, a, b, alpha=alpha, beta=beta, out=out)",
        "torch.baddbmm(addend, a, b, beta=beta, out=out)",
    ),
    Curated(
        _PRODUCTS, "torch.baddbmm(out, a, b, alpha=alpha, beta=0.0, out=out)", "torch.baddbmm(out, a, b, alpha=alpha, out=out)"
    ),
    Curated(_PRODUCTS, "if a.size(0) > 1 and (self.one_by_one or not is_dense(out)):", "if False:"),
    Curated(_PRODUCTS, "return BlockedProducts(one_by_one=deterministic)", "return BlockedProducts()"),
    Curated(_WORKSPACE, "key = (name, dtype, device)", 'key = ("any", dtype, device)'),
    Curated(_WORKSPACE, "if flat is None or flat.numel() < size:", "if flat is None or flat.numel() != size:"),
    # Learning rates
    Curated(_LR, "return 0.2 * math.sqrt(max(rows, cols))", "return 0.2 * math.sqrt(min(rows, cols))"),
    Curated(_LR, "return 0.2 * math.sqrt(max(rows, cols))", "return 0.2 * math.sqrt(rows)"),
    Curated(_LR, "return 0.2 * math.sqrt(max(rows, cols))", "return 0.2 * max(rows, cols)"),
    Curated(_LR, "return 0.2 * math", "return 0.21 * math"),
    Curated(_LR, "math.sqrt(max(1.0, rows / cols))", "math.sqrt(max(1.0, cols / rows))"),
    Curated(_LR, "math.sqrt(max(1.0, rows / cols))", "max(1.0, rows / cols)"),
    Curated(_LR, "return math.sqrt(rows / cols)", "return math.sqrt(cols / rows)"),
    Curated(_LR, "factor = rule(rows, cols)", "factor = rule(cols, rows)"),
    Curated(_LR, "else _RULES[rule](rows, cols)", "else _RULES[rule](cols, rows)"),
    # The step
    Curated(_COLLECT, "            and self.shape == param.shape\n", ""),
    Curated(_COLLECT, "            and self.treatment is treatment\n", ""),
    Curated(_COLLECT, "            and self.one.name == name\n", ""),
    Curated(_COLLECT, "and known.one.group is group and known.holds", "and known.holds"),
    Curated(_SEEN, "            self._group is group\n            and self._treatment", "            self._treatment"),
    Curated(_SEEN, "            and self._treatment is treatment\n", ""),
    Curated(_SEEN, "            and all(map(operator.is_, params, self._params))\n", ""),
    Curated(_SEEN, '            and self._names == group["param_names"]\n', ""),
    Curated(_SEEN, "            and self._were == self._facts_of(params)\n", ""),
    Curated(_SEEN, "            and self._active == [param.grad is not None for param in params]\n", ""),
    Curated(
        _SEEN, "self._gradients is not None and self._gradients == self._facts_of_gradients()", "self._gradients is not None"
    ),
    Curated(_SEEN, "            self._keys == list(map(list, entries))\n            and len", "            len"),
    Curated(_SEEN, "            and all(value is known() for value, known in zip(values, self._values, strict=True))\n", ""),
    Curated(_COLLECT, "                self._work = (None, [])\n                for known", "                for known"),
    Curated(_COLLECT, "if made_for is outcome.plan:", "if made_for is not None:"),
    Curated(_COLLECT, "            one.momentum_buffer, one.memory = one.param, None\n", "            pass\n"),
    Curated(_COLLECT, "complete = not outcome.zeros and all(", "complete = all("),
    Curated(_COLLECT, "one.memory = settings[one.group], entry", "one.memory = one.settings, entry"),
    Curated(_COLLECT, 'decay = 1 - lr * float(group["weight_decay"])', 'decay = 1 + lr * float(group["weight_decay"])'),
    Curated(_COLLECT, 'decay = 1 - lr * float(group["weight_decay"])', 'decay = 1 - float(group["weight_decay"])'),
    Curated(_COLLECT, 'decay = 1 - lr * float(group["weight_decay"])', "decay = 1.0"),
    Curated(_COLLECT, 'rate = -lr if group["maximize"] else lr', "rate = lr"),
    Curated(_COLLECT, 'rate = -lr if group["maximize"] else lr', 'rate = lr if group["maximize"] else -lr'),
    Curated(_COLLECT, 'nesterov=group["nesterov"]', "nesterov=True"),
    Curated(_COLLECT, 'momentum = float(group["momentum"])', "momentum = 0.95"),
    Curated(_COLLECT, 'resolve_scheme(group["scheme"], group["ns_steps"])', 'resolve_scheme(group["scheme"], 5)'),
    Curated(_COLLECT, 'resolve_scheme(group["scheme"], group["ns_steps"])', 'resolve_scheme("polar_express", group["ns_steps"])'),
    Curated(_COLLECT, 'partial(lr_factor, group["adjust_lr_fn"])', 'partial(lr_factor, "match_rms_adamw")'),
    Curated(_COLLECT, 'free_grad=group["none_grad"]', "free_grad=True"),
    Curated(_MUON, "momentum: float = 0.95", "momentum: float = 0.9"),
    Curated(_MUON, "weight_decay: float = 0.1,", "weight_decay: float = 0.01,"),
    Curated(_MUON, "ns_steps: int = 5", "ns_steps: int = 6"),
    Curated(_MUON, "nesterov: bool = True", "nesterov: bool = False"),
    Curated(_ELEMENTWISE, "torch.add(grad, buffer, alpha=momentum, out=view)", "torch.add(grad, buffer, alpha=1.0, out=view)"),
    Curated(
        _ELEMENTWISE, "torch.add(grad, buffer, alpha=momentum, out=view)", "torch.add(grad, buffer, alpha=1 - momentum, out=view)"
    ),
    Curated(
        _ELEMENTWISE, "torch.add(grad, buffer, alpha=retain, out=buffer)", "torch.add(grad, buffer, alpha=1 - retain, out=buffer)"
    ),
    Curated(_ELEMENTWISE, "buffer.mul_(retain).add_(grad)", "buffer.add_(grad).mul_(retain)"),
    Curated(_ELEMENTWISE, "view.copy_(grad).add_(buffer, alpha=momentum)", "view.copy_(grad).add_(buffer)"),
    Curated(_ELEMENTWISE, "torch._foreach_mul_(buffers, retain)", "torch._foreach_mul_(buffers, 1.0)"),
    Curated(_ELEMENTWISE, "torch._foreach_add_(views, buffers, alpha=momentum)", "torch._foreach_add_(views, buffers)"),
    Curated(_ELEMENTWISE, "(usually if kind is usual else adds_alike(kind, kind))", "usually"),
    Curated(_PARTS, "if settings.nesterov:", "if not settings.nesterov:"),
    Curated(_PARTS, "rate, how = settings.rate * factor,", "rate, how = settings.rate,"),
    Curated(_PARTS, "settings.adjust(*first.matrices.lr_shape)", "settings.adjust(*first.matrices.lr_shape[::-1])"),
    Curated(_ELEMENTWISE, "alpha=-rate)", "alpha=rate)"),
    Curated(_ELEMENTWISE, "        torch._foreach_mul_(params, decay)\n", "        pass\n"),
    Curated(_ELEMENTWISE, "(param * update).mul_(rate) >= 0", "(param * update).mul_(rate) <= 0"),
    Curated(_ELEMENTWISE, "(param * update).mul_(rate) >= 0", "param * update >= 0"),
    Curated(_ELEMENTWISE, "torch.where(same_way, decayed, param,", "torch.where(same_way, param, decayed,"),
    Curated(
        _ELEMENTWISE,
        "        torch._foreach_mul_(params, decay)\n    if isinstance(rate, Tensor) or",
        "        torch._foreach_mul_(updates, decay)\n    if isinstance(rate, Tensor) or",
    ),
    Curated(
        _ELEMENTWISE,
        "        torch._foreach_add_(params, updates, alpha=-rate)\n",
        "        torch._foreach_div_(params, decay)\n        torch._foreach_add_(params, updates, alpha=-rate)\n"
        "        torch._foreach_mul_(params, decay)\n",
    ),
    Curated(_PARTS, "if one.settings.free_grad:", "if not one.settings.free_grad:"),
    Curated(_BUILD, "((order, begins), (order[::-1], ends))", "((order, begins), (order, ends))"),
    Curated(_BUILD, "((order, begins), (order[::-1], ends))", "((order[::-1], begins), (order[::-1], ends))"),
    Curated(_CHECKPOINT, "/ (1 - _momentum(name, saved))", "/ 1"),
    Curated(_ALIGNED, "return -(-size // line) * line", "return size"),
    Curated(_ALIGNED, "flat.data_ptr() % ALIGNMENT == 0:", "True:"),
    Curated(_ALIGNED, "return batch.data_ptr() % ALIGNMENT == 0 and apart % ALIGNMENT == 0", "return True"),
    Curated(_ALIGNED, "return batch.data_ptr() % ALIGNMENT == 0 and", "return"),
    Curated(_PRODUCTS, "(self.one_by_one or not is_dense(out))", "self.one_by_one"),
    Curated(_ITERATION, "result.dtype == dtype and is_aligned(result)", "result.dtype == dtype"),
    Curated(_ITERATION, "torch.float64 in (batch.dtype, dtype)", "batch.dtype == torch.float64"),
    Curated(_ELEMENTWISE, "for size in _TRIAL_SIZES", "for size in (8,)"),
    Curated(_ELEMENTWISE, "or not (all_add_alike(params, updates) if alike is None else alike)", ""),
    Curated(_ELEMENTWISE, "view.copy_(buffer).mul_(momentum).add_(grad)", "view.copy_(grad).add_(buffer, alpha=momentum)"),
    Curated(_STAGE, "    if not one_by_one:\n        return [(seen, numbers)]", "    if True:\n        return [(seen, numbers)]"),
    Curated(_RULES, "memory.mul_(self.beta2).add_(squares * (1 - self.beta2))", "memory.mul_(self.beta2).add_(squares)"),
    Curated(_RULES, "update.mul_(before / after / root)", "update.div_(root)"),
    Curated(_RULES, "update.mul_(before / after / root)", "update.mul_(before / after / memory)"),
    Curated(_RULES, "squares / root.square()", "squares / root"),
    Curated(_RULES, ".square().div_(max(1, update.size(-1)))", ".square()"),
    Curated(_RULES, "min(update.size(-2), update.size(-1)) ** 0.5", "max(update.size(-2), update.size(-1)) ** 0.5"),
    Curated(_RULES, "momentum.div_(norm.masked_fill_(norm == 0, 1.0))", "pass"),
    Curated(_STAGE, "seen = matrices.mT if flipped else matrices", "seen = matrices"),
    Curated(
        _STAGE,
        "        rule.before(matrices)\n    orthogonalise()",
        "        pass\n    orthogonalise()\n    for matrices, _ in seen:\n        rule.before(matrices)",
    ),
    Curated(_MEMORY, "holders = [rank for rank in piece.holders if rank in task.spread.place]", "holders = list(piece.holders)"),
    Curated(_MEMORY, "piece.cols if flipped else piece.rows", "piece.rows"),
    Curated(_MEMORY, "holder == source)", "True)"),
    Curated(_MEMORY, "window=work.matrices.memory_window", "window=None"),
    Curated(_MEMORY, "        store_memory(self.returned, work)\n", "        pass\n"),
    Curated(_ADAMW, "beta1=beta1,", "beta1=beta2,"),
    Curated(_ADAMW, 'weight_decay=float(param_group["weight_decay"]),', "weight_decay=0.0,"),
    Curated(_ADAMW, 'maximize=param_group["maximize"],', "maximize=False,"),
    Curated(_ADAMW, "eps=adamw_eps(param_group),", "eps=1e-8,"),
    # What is computed together, and what is one matrix
    Curated(_BATCHES, "(item.rows, item.cols, item.treatment)", "(item.rows, item.cols)"),
    Curated(_BATCHES, "max(1, budget //", "max(2, budget //"),
    Curated(_BATCHES, "largest = min(largest, chunk_size)", "largest = max(largest, chunk_size)"),
    Curated(_INSIDE, "return MatrixSet(1, shape[0], shape[1])", "return MatrixSet(1, shape[1], shape[0])"),
    Curated(_INSIDE, "math.prod(shape[1:])", "math.prod(shape[2:])"),
    Curated(_DEVICE, 'if graphs and device.type == "cuda"', 'if graphs or device.type == "cuda"'),
    Curated(_DEVICE, "        self._graph = graph\n", ""),
    Curated(_DEVICE, "            self._graph.replay()\n            return\n", "            self._graph.replay()\n"),
    # Who holds what
    Curated(_CUTS, "size = -(-length(ranges) // parts)", "size = length(ranges) // parts"),
    Curated(_CUTS, "for piece in _chunk(ranges, split_factor)]", "for piece in _chunk(ranges, parts)]"),
    Curated(_CUTS, "max(start, start + first - position)", "start"),
    Curated(_LAYOUT, "index = index * shape[axis] + where[axis]", "index = index + where[axis] * shape[axis]"),
    Curated(_SPREAD, "(piece, piece.holders[replica]) for piece", "(piece, piece.holders[0]) for piece"),
    Curated(_SPREAD, "found[1] == self.place[owner][1]", "found[1] == 0"),
    Curated(_SPREAD, "(p.holders[k],)) for p in self.pieces", "(p.holders[0],)) for p in self.pieces"),
    Curated(_SPREAD, "(index * size + start, index * size + stop)", "(index + start * size, index + stop * size)"),
    Curated(_SPREAD, "if len(self.place) != len(self.pieces) * self.replicas:", "if False:"),
    # Owners
    Curated(_OWNERS, "[by_cost] if by_cost == by_choice else [by_cost, by_choice]", "[by_cost]"),
    Curated(_OWNERS, "[by_cost] if by_cost == by_choice else [by_cost, by_choice]", "[by_choice]"),
    Curated(_OWNERS, "key=lambda k: (-jobs[k].cost, k))", "key=lambda k: (jobs[k].cost, k))"),
    Curated(_OWNERS, "[*fixed, *order]", "[*order, *fixed]"),
    Curated(_OWNERS, "if load == self._loads[rank]:", "if True:"),
    Curated(_OWNERS, "                return rank\n", "                return max(candidate for _, candidate in heap)\n"),
    Curated(_OWNERS, "        loads[rank] += jobs[k].cost\n", ""),
    Curated(_OWNERS, "sums[k * ranks + 1] - sums[k * ranks - k]", "sums[k + 1]"),
    Curated(_PLAN_COST, "inside = 2 * (pieces - 1) / pieces", "inside = 2 * pieces / pieces"),
    Curated(_PLAN_COST, "self.flops_per_byte * 2 * spread.size", "self.flops_per_byte * spread.size"),
    # Plans
    Curated(_PLAN, 'return options.replicas == "share" and not entry.private', 'return options.replicas == "share"'),
    Curated(_PLAN, "if spread.replicas > 1 and _shares(", "if _shares("),
    Curated(_PLAN, "for one in spread.separate_replicas:", "for one in spread.separate_replicas[:1]:"),
    Curated(_PLAN, "                for target in piece.holders:\n", "                for target in piece.holders[:1]:\n"),
    Curated(_PLAN, "                if source != task.owner:\n", ""),
    Curated(_WAVES, "waves[k] = len(lane_of_wave) + wave", "waves[k] = wave"),
    Curated(_PLAN, "facts = entry.name, layouts, details", "facts = layouts, details"),
    Curated(_PLAN, "entry.itemsize, entry.flops, entry.share", "entry.itemsize, entry.share"),
    Curated(_PLAN, "hashlib.sha256(repr(self.options).encode())", "hashlib.sha256()"),
    Curated(_PLAN, "layout.mesh.shape, layout.mesh.ranks, layout.placements", "layout.mesh.shape, layout.placements"),
    Curated(_PLAN, "            if not entry.private:\n                layouts", "            if True:\n                layouts"),
    Curated(_PLAN, "task.spread.size * task.spread.replicas - own)", "task.spread.size - own)"),
    Curated(_PLAN, "        sent[task.owner] -= size * own", "        sent[task.owner] -= 0 * own"),
    Curated(_PLAN, "if task.wave != NO_WAVE and task.owner not in task.spread.place:", "if False:"),
    Curated(_PLAN, "if holders != expected or", "if"),
    # Waves and routes
    Curated(_WAVES, "int(heaviest / limits.smallest)", "int(limits.smallest / heaviest)"),
    Curated(_WAVES, "position // chunk_size", "position // (chunk_size + 1)"),
    Curated(_WAVES, "while count < self.longest and not _fits(", "while count < self.longest and _fits("),
    Curated(_WAVES, "len(sizes) > 1 and sum(sizes) > budget", "len(sizes) > 1 and max(sizes) > budget"),
    Curated(_WAVES, "enumerate(sorted(set(waves)))", "enumerate(range(max(waves) + 1))"),
    Curated(_ROUTES, "(send.source, send.target, send.task)", "send.task"),
    Curated(_ROUTES, "(send.source, send.target, send.task)", "(send.source, send.target, -send.task)"),
    Curated(_ROUTES, "            if spread.sends_to(rank, task.owner):\n", "            if True:\n"),
    Curated(_ROUTES, "spread.pieces[spread.place[rank][0]]", "spread.pieces[0]"),
    Curated(_BUFFERS, "max(_elements(routes.gather_out), _elements(routes.scatter_in))", "_elements(routes.gather_out)"),
    Curated(_BUFFERS, "0 if mirrored else goes)", "0)"),
    Curated(_BUFFERS, "travelling + _elements(routes.own), travelling, comes", "travelling + _elements(routes.own), 0, comes"),
    Curated(_FOOTPRINT, "slot = rank, wave % in_flight", "slot = rank, 0"),
    Curated(_FOOTPRINT, "spread.size * spread.replicas - own if", "spread.size - own if"),
    Curated(_FOOTPRINT, "            if copies:  #", "            if False:  #"),
    Curated(_FOOTPRINT, "(copies or gathered)", "copies"),
    Curated(_FOOTPRINT, "+ count * size", "+ size"),
    Curated(_WAVES, "max(total.values(), default=0) <= bound", "True"),
    Curated("meshmuon/transport/data_parallel.py", "    if flat is not tensor:\n", "    if False:\n"),
    Curated(
        "meshmuon/transport/groups.py",
        "known = sum(name.startswith(base) for name in group_names())",
        "known = 0",
    ),
    Curated("meshmuon/transport/norms.py", "difference.abs()) != 0)", "difference) != 0)"),
    Curated(
        "meshmuon/optim/dist_muon.py", "self._complete and not outcome.plan.tasks", "self._complete or not outcome.plan.tasks"
    ),
    Curated("meshmuon/optim/dist_muon.py", "self._complete and not outcome.plan.tasks", "not outcome.plan.tasks"),
    Curated("meshmuon/optim/dist_muon.py", "plan, group = self._dividing,", "plan, group = self._executor.plan,"),
    Curated(
        "meshmuon/state/param_state.py", 'if "step" in param_state and not param_group["use_muon"]:', 'if "step" in param_state:'
    ),
    Curated("meshmuon/optim/offload.py", "            self.settle()  # before", "            # before"),
    Curated("meshmuon/qk_clip/clip.py", "if k == 0:  # every", "if True:  # every"),
    Curated("meshmuon/execute/data_parallel.py", "        self._failures.clear()  #", "        #"),
    Curated("meshmuon/execute/data_parallel.py", "if one.settings.free_grad:", "if True:"),
    Curated(_LOCAL_PLANNER, "expected == plan_input.local_shape:", "math.prod(expected) == math.prod(plan_input.local_shape):"),
    Curated(_ADAMW, "if local_part(state[key]).stride() != local_part(param).stride():", "if False:"),
    Curated(_EXECUTOR, "        program.failures.clear()  #", "        #"),
    Curated(_PIPELINE, "        except TransportError:\n            raise\n", ""),
    Curated(_ELEMENTWISE, "        torch._foreach_add_(updates, 0.0)", "        pass"),
    Curated(
        _ELEMENTWISE,
        "if grad.dtype is kind and (usually if kind is usual else adds_alike(kind, kind)):",
        "if grad.dtype is kind:",
    ),
    Curated(_ELEMENTWISE, "(param * update).mul_(rate) >= 0", "(param * update).mul_(rate) > 0"),
    Curated(_MEMORY, "source = task.owner if task.owner in holders else holders[0]", "source = holders[0]"),
    Curated(_PLAN, "[(task.owner, task.wave) for task in self.tasks if", "[task.owner for task in self.tasks if"),
    Curated(_PLAN, "[(task.owner, task.wave) for task in self.tasks if", "[task.wave for task in self.tasks if"),
    Curated(_OWNERS, "sorted(free, key=lambda k: (len(jobs[k].spread.place), -jobs[k].cost, k))", "by_cost"),
    Curated(_WAVES, "_STEEPEST = 4", "_STEEPEST = 40"),
    Curated(_WAVES, "range(most - 1, 1, -1)", "range(most - 1, 2, -1)"),
    Curated(_WAVES, "bound, most = 2 * limits.budget * limits.in_flight", "bound, most = 4 * limits.budget * limits.in_flight"),
    Curated(_WAVES, "bound, most = 2 * limits.budget * limits.in_flight", "bound, most = limits.budget * limits.in_flight"),
    Curated(_WAVES, "total.update(lane.footprint", "total = Counter(lane.footprint"),
    Curated(_WAVES, "else (alone, 1)", "else (alone, most)"),
    Curated(_WAVES, "else (alone, 1)", "else (usual, 1)"),
    Curated(_WAVES, "lane.within_budget(count + 1 + count // 8)", "min(lane.longest, count + 1 + count // 8)"),
    Curated(_WAVES, "2 * turn + position % 2", "turn"),
    Curated(_PLAN, "replace(options, in_flight=schedule.in_flight)", "options"),
    # Running a plan
    Curated(_BUILD, "_offsets(routes.own, sizes.own_offset)", "_offsets(routes.own)"),
    Curated(_BUILD, "(*routes.scatter_in, *routes.gather_out, *routes.own)", "(*routes.gather_out, *routes.own)"),
    Curated(_BUILD, "(*routes.scatter_in, *routes.gather_out, *routes.own)", "(*routes.scatter_in, *routes.gather_out)"),
    Curated(_BUILD, "for send, at in (*back, *own)]", "for send, at in back]"),
    Curated(_BUILD, "for send, at in (*out, *own)]", "for send, at in (*back, *own)]"),
    Curated(_BUILD, "slot_sizes([self.sizes[k] for k in mine if k % turns == slot])", "slot_sizes([self.sizes[mine[0]]])"),
    Curated(_BUILD, "k % self.plan.options.in_flight\n", "0\n"),
    Curated(_BUILD, "            (own, into_buffers, 0),\n", ""),
    Curated(_BUILD, "Copies([], []) if rough is None else Copies([mine], [rough])", "Copies([], [])"),
    Curated(_BUILD, "_counts(goes, lambda send: send.target)", "_counts(goes, lambda send: send.source)"),
    Curated(_BUILD, "Slice(task.entry, runs[-1].start, at + 1)", "Slice(task.entry, at, at + 1)"),
    Curated(_BUILD, "rest = set(self.first) - set().union(*touched)", "rest = set()"),
    Curated(_BUILD, "[*range(min(first, count)), *range(count", "[*range(count), *range(count"),
    Curated(_COPIES, "(len(run) == 1 or gap == step)", "True"),
    Curated(_COPIES, "block.kind == last.kind and", ""),
    Curated(_COPIES, "min(gap) > 0 and", ""),
    Curated(_COPIES, "memory.storage_offset() + offset)", "offset)"),
    Curated(_COPIES, "runs = min(by_stage, by_buffer, key=len)", "runs = by_buffer"),
    Curated(_COPIES, "one.offset + top * width + left", "one.offset + row * width + left"),
    Curated(_PIPELINE, "len(gathering) + len(scattering) < width", "len(gathering) + len(scattering) <= width"),
    Curated(_PIPELINE, "len(gathering) + len(scattering) < width", "len(gathering) < width"),
    Curated(_PIPELINE, "wave = gathering.popleft()", "wave = gathering.pop()"),
    Curated(_WAVE, "            self.touch.accumulate(work)\n", ""),
    Curated(_WAVE, "            gather.wait()\n", "            pass\n"),
    Curated(_WAVE, "                scatter.wait()\n", "                pass\n"),
    Curated(_WAVE, "            self.rounding.run()\n", ""),
    Curated(_WAVE, "            streams.main_waits(filled)\n", ""),
    Curated(_WAVE, "with streams.beside(packed):", "with streams.beside(ready):"),
    Curated(_WAVE, "streams.beside(ready, self.touch.gradients(work))", "streams.beside(ready)"),
    Curated(_EXECUTOR, "        program.rest.free_gradients(work)\n", ""),
    Curated(_EXECUTOR, "        streams.main_waits(streams.side_mark())\n", ""),
    # Agreeing
    Curated(_EXCHANGE, "received, sent, received_splits, sent_splits,", "received, sent, sent_splits, received_splits,"),
    Curated(_AGREEMENT, "(vote.token, -vote.token,", "(vote.token, vote.token,"),
    Curated(_AGREEMENT, "dist.ReduceOp.MAX", "dist.ReduceOp.MIN"),
    Curated(_GROUPS, "== list(ranks):", "!= list(ranks):"),
    Curated(_GROUPS, "if _moves_host_memory(group):", "if not _moves_host_memory(group):"),
    Curated(_GROUPS, 'f"{base} {known}"', 'f"{base} {len(group_names())}"'),
    Curated(_COMPAT, "list(ranks).index(dist.get_rank()),", "0,"),
    Curated(_COMPAT, "layout.remap_to_tensor(rank_map).flatten(1).tolist()", "mesh.mesh.flatten()[None].tolist()"),
    Curated(_COMPAT, "list(axes) == sorted(axes)", "True"),
    Curated(_COMPAT, "and orders[0] == orders[1]", ""),
    Curated(_COMPAT, "torch.autograd.graph.increment_version(tensors)", "pass"),
    Curated(_COMPAT, "and param.sharded_state is not self._unsharded", ""),
    Curated(
        _LOCAL_PLANNER,
        "for part, planned in enumerate(parts)\n            if active[index]",
        "for part, planned in enumerate(parts)",
    ),
    Curated(_LOCAL_PLANNER, "if active[index] and not plan_input.has_grad", "if False"),
    Curated(
        _LOCAL_PLANNER, "(self._settings.path, plan.digest, adamw, differing,", '(self._settings.path, "", adamw, differing,'
    ),
    Curated(
        _LOCAL_PLANNER, "(self._settings.path, plan.digest, adamw, differing,", "(self._settings.path, plan.digest, differing,"
    ),
    Curated(_LOCAL_PLANNER, "(self._settings.path, plan.digest, adamw, differing,", "(plan.digest, adamw, differing,"),
    Curated(_LOCAL_PLANNER, "(self._settings.path, plan.digest, adamw, differing,", "(self._settings.path, plan.digest, adamw,"),
    Curated(_LOCAL_PLANNER, "active[index] = any(column)", "active[index] = all(column)"),
    # Which optimizer, how often, with what state
    Curated(_PLANNING, "hyperparameters, known, self._local", "hyperparameters, self._local"),
    Curated(_PLANNING, "known, self._local.positions_among_shared(status.without_state)", "known"),
    Curated(_PLANNING, "self._pairing = Pairing(shared_id, steps - 1)", "self._pairing = Pairing(shared_id, steps)"),
    Curated(_DIFFERENCES, "place.lookalikes == model_place.lookalikes and place != model_place", "place != model_place"),
    Curated(_IDENTITY, "return Pairing(shared_id) if shared_id else self", "return self"),
    Curated(_IDENTITY, "descent = (*copied, next(_numbers))", "descent = (next(_numbers),)"),
    Curated(_KEEPING, "return any(bool(local_part(value).count_nonzero())", "return any(True"),
    Curated(_LINK, "elif self._world() is None or self._world() is not current_world():", "elif False:"),
    # Streams
    Curated(_DEVICE, "        self._side.wait_event(after)", "        pass"),
    Curated(_DEVICE, "            tensor.record_stream(self._side)\n", "            pass\n"),
    Curated(
        _DEVICE, "event: Mark = self._side.record_event()", "event: Mark = torch.cuda.current_stream(self._device).record_event()"
    ),
)

EQUIVALENT: tuple[Equivalent, ...] = ()
