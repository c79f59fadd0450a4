"""Mutants of the metrics: their maths, who counts what, what ranks add up."""

from __future__ import annotations

from . import Mutants

MUTANTS: Mutants = {
    "meshmuon.metrics.spectra": {
        "wide": (("$stacked.size(1) <= $stacked.size(2)", "True"),),
        "squares": (("$rows.square_().sum(-1)", "$rows.sum(-1)"),),
        "tridiagonalise": (
            ("product.addcmul_(before, beside[-1], value=-1)", "pass"),
            ("product.addcmul_(unit, diagonal[-1], value=-1)", "pass"),
            ("$lengths > _EXHAUSTED", "$lengths >= 0"),
        ),
        "by_matrices": (
            ("$norms.reciprocal()", "$norms"),
            ("$product.mul_($scale)", "$product"),
        ),
        "defects": (
            ("torch.addmm(once, $product, transposed, beta=-1, out=twice)", "torch.mm($product, transposed, out=twice)"),
            ("$sums.view(-1, 2) / directions.size(0)", "$sums.view(-1, 2) / directions.size(1)"),
        ),
        "largest_singular_values": (("$beside[:, :-1]", "$beside[:, 1:]"),),
        "bound_of": (("$worst * (1 + 1e-3)", "$worst * 2"),),
    },
    "meshmuon.metrics.shards": {
        "counts_here": (("not any($parts)", "True"),),
        "LocalMatrices.multiply": (("$pieces.mT if $transposed else $pieces", "$pieces"),),
    },
    "meshmuon.metrics.sums": {
        "SquareSums.write": (("$norms.double().square_()", "$norms.double()"),),
    },
    "meshmuon.metrics.weight_vectors": {
        "WeightVectors.begin": (("self.half_iterations += 1", "pass"),),
        "WeightVectors._extend": (("$length > _EXHAUSTED * $longest_yet", "$length >= 0"),),
        "longest": (("range(_SQUARINGS)", "range(1)"),),
    },
    "meshmuon.metrics.adamw_updates": {
        "_updates": (("square.float().div(second)", "square.float()"),),
        "batches": (("$elements + $mean.numel() > _CHUNK", "False"),),
    },
    "meshmuon.metrics.recorder": {
        "StepRecorder.seconds": (("$total[$around] -= $duration", "pass"),),
    },
    "meshmuon.metrics.meter": {
        "Meter.is_due": (("$steps % self.options.every == 0", "$steps % self.options.every != 0"),),
        "Meter.finish": (("$decision.exchange.add_up($values)", "pass"),),
        "Meter.prepare": (("self._prepared.vectors.restart()", "pass"),),
        "_Reporter.__init__": (("$rank == $first", "True"),),
    },
    "meshmuon.metrics.report": {
        "_update": (("$norm / math.sqrt(max(1, $elements))", "$norm / max(1, $elements)"),),
        "_qk_clip": (("math.sqrt($measurement.threshold / $largest)", "$measurement.threshold / $largest"),),
        "aggregate": (("math.sqrt($sum)", "$sum"),),
    },
    "meshmuon.metrics.alarms": {
        "Health.check": (
            ("self._streaks[$key] == $patience", "self._streaks[$key] >= $patience"),
            ("key in found", "True"),
        ),
    },
}
