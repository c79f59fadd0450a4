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
        "symmetric_flops": (("2 * ($stop - $start) * $stop", "2 * ($stop - $start) * n"),),
        "orthogonalize_flops": (
            ("2 * $n * $n", "$n * $n"),
            ("3 * $steps - 2 * $count", "3 * $steps - $count"),
            ("(min($rows, $cols), max($rows, $cols))", "($rows, $cols)"),
        ),
    },
    "meshmuon.ortho.iteration": {
        "_apply_block": (
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
                "$quadratic = $products.symmetric($gram, $gram, $place, $gram, alpha=$c, beta=$b)\n"
                "$quadratic.diagonal(dim1=1, dim2=2).add_($a)",
                "$quadratic = $products.symmetric($gram, $gram, $place, $gram, alpha=$c)\n"
                "$quadratic.diagonal(dim1=1, dim2=2).add_($a)",
            ),
            ("$quadratic.diagonal(dim1=1, dim2=2).add_", "$quadratic.diagonal(dim1=1, dim2=2).sub_"),
            (
                "$products.symmetric($half_step, $quadratic, $scratch.square('gram'))",
                "$products.symmetric($half_step, $half_step, $scratch.square('gram'))",
            ),
            ("len($steps) - 1", "len($steps) - 2"),
        ),
        "iterate": (
            ("($moved, $x, $start + $length)", "($moved, $x, $start)"),
            ("$x, $spare, $start = ($moved, $x, $start + $length)", "$x, $start = ($moved, $start + $length)"),
            ("$x is not $result", "$x is $result"),
            ("$index == 0", "$index > 0"),
        ),
        "_normalise": (
            ("$scale.sqrt_()", ""),
            ("$gram.div_($scale)\n$scale.sqrt_()", "$scale.sqrt_()"),
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
        "_wide": (("$batch.size(1) > $batch.size(2)", "$batch.size(1) < $batch.size(2)"),),
        "Scratch.__init__": (
            ("$result.dtype == $dtype and is_aligned($result)", "$result.dtype == $dtype"),
            ("torch.float64 in ($batch.dtype, $dtype)", "$batch.dtype == torch.float64"),
        ),
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
            ("torch.bfloat16", "torch.float16"),
        ),
        "blocks_for": (("gram_blocks($scheme, $dtype)", "standard_blocks($scheme)"),),
        "orthogonalize": (("$result.copy_(call_scheme($scheme, $batch))", "pass"),),
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
            ("polar_express(steps=$steps)", "polar_express()"),
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
        "_from_triples": (("$quintics *= $steps", "$quintics *= 5"),),
    },
    "meshmuon.ortho.workspace": {
        "Workspace._flat_of": (
            ("($name, $dtype, $device)", "('any', $dtype, $device)"),
            ("$flat.numel() < $size", "$flat.numel() != $size"),
        ),
    },
}
