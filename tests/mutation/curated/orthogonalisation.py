"""Mutants of ``meshmuon/ortho``: coefficients, the iteration, its cost and its kernels."""

from __future__ import annotations

from . import Mutants

MUTANTS: Mutants = {
    "meshmuon.ortho.aligned": {
        "pitch": (("-(-$size // $line) * $line", "$size"),),
        "aligned_empty": (("$flat.data_ptr() % ALIGNMENT == 0", "True"),),
        "is_aligned": (
            ("$batch.data_ptr() % ALIGNMENT == 0 and $apart % ALIGNMENT == 0", "True"),
            ("$batch.data_ptr() % ALIGNMENT == 0 and $apart % ALIGNMENT == 0", "$apart % ALIGNMENT == 0"),
        ),
    },
    "meshmuon.ortho.blocks": {
        "": (("_OVERSHOOT = 1.05", "_OVERSHOOT = 3.0"),),
        "gram_blocks": (
            ("torch.finfo($dtype).eps / 2", "2.0**-25"),
            (
                "$outcome.overshoot <= $most and $outcome.deviation <= $deviation",
                "$outcome.overshoot <= $most or $outcome.deviation <= $deviation",
            ),
            ("($safe[$blocks].deviation, $blocks)", "$blocks"),
        ),
        "choose_blocks": (
            (
                "min($candidates, key=$flops)",
                "max($candidates, key=$flops)",
            ),
            ("(standard_blocks($scheme), gram_blocks($scheme, $dtype))", "(gram_blocks($scheme, $dtype),)"),
        ),
    },
    "meshmuon.ortho.cost": {
        "orthogonalize_flops": (
            ("2 * $n * $n", "$n * $n"),
            ("2 * $symmetric + $full", "$symmetric + $full"),
            ("(min($rows, $cols), max($rows, $cols))", "($rows, $cols)"),
        ),
    },
    "meshmuon.ortho.iteration": {
        "_apply_block": (
            ("$factor if $norm is None else $factor.div_($norm)", "$factor"),
            (
                "$moved = $products.general($quadratic, $factor, $spare)",
                "$moved = $products.general($factor, $quadratic, $spare)",
            ),
            ("$products.general($quadratic, $x, $target, $x, beta=$a)", "$products.general($quadratic, $x, $target, $x)"),
            (
                "$products.symmetric($gram, $gram, $scratch.square('quadratic'), $gram, alpha=$c, beta=$b)",
                "$products.symmetric($gram, $gram, $scratch.square('quadratic'), $gram, alpha=$b, beta=$c)",
            ),
            (
                "$products.symmetric($half_step, $quadratic, $scratch.square('gram'))",
                "$products.symmetric($half_step, $half_step, $scratch.square('gram'))",
            ),
            (
                "$gram = $products.symmetric($half_step, $quadratic, $scratch.square('gram'))",
                "$gram = $gram if step is steps[-1] else $products.symmetric($half_step, $quadratic, $scratch.square('gram'))",
            ),
        ),
        "_step_factor": (
            (
                "$products.symmetric($gram, $gram, $place, $gram, alpha=$c, beta=$b)",
                "$products.symmetric($gram, $gram, $place, $gram, alpha=$c)",
            ),
            ("$quadratic.diagonal(dim1=1, dim2=2).add_", "$quadratic.diagonal(dim1=1, dim2=2).sub_"),
            (
                "$products.inverses($gram, $step, ...)",
                "$products.inverses($gram, $step._replace(weights=$step.weights[::-1]), ...)",
            ),
        ),
        "iterate": (
            ("($moved, $x, $start + $length)", "($moved, $x, $start)"),
            ("$x, $spare, $start = ($moved, $x, $start + $length)", "$x, $start = ($moved, $start + $length)"),
            ("x is not result", "x is result"),
            ("$index == 0", "$index > 0"),
        ),
        "_normalise": (
            ("$scale.sqrt_()", "$scale"),
            ("$gram.div_($scale)", ""),
            ("$scale.clamp_(min=max(torch.finfo($gram.dtype).tiny, torch.finfo($scale.dtype).tiny))", "$scale.add_(1e-7)"),
        ),
        "_rescale": (
            ("$limits.tiny", "1e-8"),
            ("$scale.clamp_(min=$limits.tiny, max=$limits.max)", "$scale.clamp_(min=$limits.tiny)"),
            ("$lowest.neg_()", "$lowest"),
            ("math.sqrt($batch.size(2))", "1.0"),
        ),
        "scratch_bytes": (("1 if $dtype == $result_dtype else 2", "1"),),
        "Scratch.reserve": (("max($blocks) > 1", "max($blocks) > 5"),),
        "_short_side_first": (("$batch.size(1) > $batch.size(2)", "$batch.size(1) < $batch.size(2)"),),
        "Scratch.__init__": (
            ("$result.dtype == $dtype and is_aligned($result)", "$result.dtype == $dtype"),
            ("torch.float64 in ($batch.dtype, $dtype)", "$batch.dtype == torch.float64"),
        ),
    },
    "meshmuon.ortho.choice": {
        "scheme_for": (("$dtype in _SHORT", "$dtype == torch.bfloat16"),),
        "_cheapest": (
            ("worst_error($scheme, $dtype) <= $bound", "worst_error($scheme, $dtype) >= $bound"),
            ("$dtype in _SHORT", "$dtype == torch.float16"),
        ),
    },
    "meshmuon.ortho.kernels.inverse": {
        "ShiftedInverses.run": (
            ("self._mirror()", ""),
            ("$first + $index == 0", "$index == 0"),
        ),
        "_column_ranges": (("((0, LEAF), (LEAF, $half)) if $half > LEAF else ((0, $half),)", "((0, $half),)"),),
        "ShiftedInverses._shift": (("$gram_part.diagonal(dim1=1, dim2=2).add_($pole)", "$gram_part.add_($pole)"),),
        "ShiftedInverses._factor": (
            (
                "partial(torch.baddbmm, $out, $left, $right, alpha=-1.0, out=$out)",
                "partial(torch.baddbmm, $out, $left, $right, alpha=1.0, out=$out)",
            ),
            (
                "partial(torch.baddbmm, $out, $left, $right, alpha=-1.0, beta=0.0, out=$out)",
                "partial(torch.baddbmm, $out, $left, $right, alpha=1.0, beta=0.0, out=$out)",
            ),
            ("$w[:, $mid + $start:$mid + $stop, $upper]", "$w[:, $mid:$mid + $stop - $start, $upper]"),
        ),
        "ShiftedInverses._square": (("$w[:, $start:, :$stop]", "$w[:, :$w.size(1) - $start, :$stop]"),),
        "plain_inverses": (("torch.linalg.cholesky_ex($gram + $shift)", "torch.linalg.cholesky_ex($gram)"),),
        "_panels": (("[*$edges[1:], $n]", "[*$edges[1:], $n - LEAF]"),),
    },
    "meshmuon.ortho.kernels.panels": {
        "symmetric_flops": (("2 * ($stop - $start) * $stop", "2 * ($stop - $start) * n"),),
    },
    "meshmuon.ortho.kernels.products": {
        "BlockedProducts.symmetric": (
            ("$out[:, :$start, $start:$stop].copy_($panel[:, :, :$start].mT)", "pass"),
            ("None if $addend is None else $addend[:, $start:$stop, :$stop]", "None"),
        ),
        "BlockedProducts._multiply": (
            (
                "if $addend is not None:\n    torch.baddbmm($addend, ..., alpha=$alpha)\nelse: ...",
                "if $addend is not None:\n    torch.baddbmm($addend, ...)\nelse: ...",
            ),
            (
                "torch.baddbmm($out, $a, $b, alpha=$alpha, beta=0.0, out=$out)",
                "torch.baddbmm($out, $a, $b, alpha=$alpha, out=$out)",
            ),
            ("$a.size(0) > 1 and (self.one_by_one or not is_dense($out))", "False"),
            ("self.one_by_one or not is_dense($out)", "self.one_by_one"),
        ),
        "products_for": (("BlockedProducts(one_by_one=$deterministic)", "BlockedProducts()"),),
    },
    "meshmuon.ortho.newton_schulz": {
        "default_compute_dtype": (
            ("if $dtype == torch.float64:\n    return $dtype", "if $dtype == torch.float64:\n    return torch.float32"),
            ("torch.float16", "torch.bfloat16"),
        ),
        "blocks_for": (("gram_blocks($scheme, $dtype)", "standard_blocks($scheme)"),),
        "orthogonalize": (("$result.copy_(call_scheme($scheme, $batch))", "pass"),),
    },
    "meshmuon.ortho.rational": {
        "Rational.__call__": (
            ("$weight / ($square + $pole)", "$weight / ($square - $pole)"),
            ("$square * ($self.linear + $square * $self.quadratic)", "$square * $self.linear"),
        ),
        "Rational.scaled": (
            (
                "Rational($constant * $factor, $poles, $weights, $linear * $factor, $quadratic * $factor)",
                "Rational($constant, $poles, $weights, $linear * $factor, $quadratic * $factor)",
            ),
            (
                "Rational($constant * $factor, $poles, $weights, $linear * $factor, $quadratic * $factor)",
                "Rational($constant * $factor, $poles, $weights, $linear * $factor, $quadratic)",
            ),
        ),
        "Rational.is_hybrid": (("bool($self.linear or $self.quadratic)", "bool($self.quadratic)"),),
        "zolotarev_step": (
            ("($points[0:$count - 1:2], $points[1:$count - 1:2])", "($points[1:$count - 1:2], $points[0:$count - 1:2])"),
            ("($zero - $pole for $zero in $even)", "($zero + $pole for $zero in $even)"),
            ("2 / ($step($low) + $step(1.0))", "1 / $step(1.0)"),
            ("reversed($points)", "$points"),
        ),
        "halley_step": (
            ("8 - 4 * $d + $rest", "8 + 4 * $d + $rest"),
            ("$a + $b - 1", "$a + $b + 1"),
            ("($a - $b / $c) / $c", "($a + $b / $c) / $c"),
        ),
        "_elliptic_tangents": (("2 * $poles + 1", "2 * $poles"),),
    },
    "meshmuon.ortho.remez": {
        "": (("3 / 8", "3 / 7"),),
        "Quintic.__call__": (("self.b + $square * self.c", "self.b - $square * self.c"),),
        "Quintic.stretched": (
            ("$factor ** 3", "$factor ** 2"),
            ("$factor ** 5", "$factor ** 3"),
        ),
        "Quintic.scaled": (("self.c * $factor", "self.c"),),
        "_limit_error": (("9 * $x", "8 * $x"),),
        "_solve_difference": (("(-1.0) ** $index", "1.0"),),
        "_to_powers_of_x": (
            ("2 * $d2", "$d2"),
            ("$d0 - $d1 * $centre / $radius + $d2", "$d0 + $d1 * $centre / $radius + $d2"),
        ),
        "_best_around_one": (
            ("$half < 1e-9", "$half < 1e-4"),
            ("1e-15 * $error", "1e-4 * $error"),
        ),
        "best_quintic": (("($high - $low) / ($high + $low)", "($high - $low) / 2"),),
    },
    "meshmuon.ortho.schemes": {
        "keller": (
            ("Quintic(3.4445, ...)", "Quintic(3.4455, ...)"),
            ("-4.775", "-4.776"),
            ("Quintic(..., 2.0315)", "Quintic(..., 2.0314)"),
            ("-4.775", "4.775"),
            ("($quintic,) * $steps", "($quintic,) * 5"),
        ),
        "": (
            ("keller($steps)", "keller()"),
            ("lambda $steps: polar_express(steps=$steps)", "lambda $steps: polar_express()"),
            ("AUTO if $steps == DEFAULT_STEPS else polar_express(steps=$steps)", "AUTO"),
        ),
        "polar_express": (
            ("l: $type = 1e-3", "l: $type = 2e-3"),
            ("safety: $type = 0.01", "safety: $type = 0.02"),
            ("cushion: $type = 0.02", "cushion: $type = 0.03"),
            ("range($steps)", "range(5)"),
            ("$steps - 1", "$steps"),
            ("1 + $safety", "1 - $safety"),
            ("$quintic.stretched", "$quintic.scaled"),
            ("2 / ($quintic($low) + $quintic($high))", "1 / $quintic($high)"),
            ("max($low, $cushion * $high)", "$low"),
            ("max($low, $cushion * $high)", "max($low, $cushion)"),
            ("2 - $low", "1.0"),
        ),
        "Scheme.__call__": (("self.steps", "reversed(self.steps)"),),
        "_from_rows": (("$parsed *= $steps", "$parsed *= 5"),),
    },
    "meshmuon.ortho.workspace": {
        "Workspace._flat_of": (
            ("($name, $dtype, $device)", "('any', $dtype, $device)"),
            ("$flat.numel() < $size", "$flat.numel() != $size"),
        ),
    },
}
