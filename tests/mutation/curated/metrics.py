"""Mutants of the metrics: their maths, who counts what, what ranks add up."""

from __future__ import annotations

from . import Mutants

MUTANTS: Mutants = {
    "meshmuon.metrics.spectra": {
        "wide": (("$stacked.size(1) <= $stacked.size(2)", "True"),),
        "squares": (("$rows.square_().sum(-1)", "$rows.sum(-1)"),),
        "bidiagonalise": (
            ("rows_times($right[-1] * $scale, $a.mT)", "rows_times($right[-1], $a.mT)"),
            ("$norms.reciprocal()", "$norms"),
        ),
        "_next": (
            ("$vector - ($shadows * $basis).sum(1, keepdim=True)", "$vector"),
            ("$length > _EXHAUSTED", "$length >= 0"),
        ),
        "defects": (
            ("rows_times(rows_times(once, a), a.mT).sub_(once)", "rows_times(rows_times(once, a), a.mT)"),
            ("rows_times(rows_times(z, a), a.mT).sub_(z)", "rows_times(rows_times(z, a), a.mT)"),
            ("directions.size(0)", "directions.size(1)"),
        ),
        "largest_singular_values": (("$below[:, :-1]", "$below[:, 1:]"),),
        "bound_of": (("$worst * (1 + 1e-3)", "$worst * 2"),),
    },
    "meshmuon.metrics.shards": {
        "counts_here": (("not any($parts)", "True"),),
        "LocalMatrices.multiply": (("(pieces.mT, self.cols, self.rows)", "(pieces, self.rows, self.cols)"),),
    },
    "meshmuon.metrics.recorder": {
        "_adamw_square": (
            ("v.float().div(second)", "v.float()"),
            ("1 - $beta ** $step.double()", "1 - $beta"),
        ),
        "StepRecorder.seconds": (("$total[$around] -= $duration", "pass"),),
    },
    "meshmuon.metrics.meter": {
        "Meter.is_due": (("$steps % self.options.every == 0", "$steps % self.options.every != 0"),),
        "Meter.finish": (("$decision.exchange.add_up($values)", "pass"),),
        "Meter._normalise": (("self._half_iterations += 1", "pass"),),
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
