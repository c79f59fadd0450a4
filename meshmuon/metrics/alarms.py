"""What goes wrong in practice, said in words: watches the measurements of a run and raises alarms."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LOSES_UPDATES = {"bfloat16": 2.0**-10, "float16": 2.0**-13, "float32": 2.0**-26, "float64": 2.0**-55}
"""Updates below this share of the weight vanish when the weight is rounded to nearest: a quarter of its last
digit's step.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something counts as wrong.

    Attributes:
        patience: number of successive measurements that must show it. An lr of the wrong convention is said at the
            first.
        update_to_weight: largest healthy norm of an update over that of its weight.
        logits: largest healthy attention logit, as long as logits grow.
        growth: how much logits must have grown over ``patience`` measurements.
        stable_rank: largest stable rank of a momentum that counts as rank one.
        apart: how much farther the entries of Muon's matrices may move in a step than those of any parameter of AdamW.
        behind: how much less than those of any of them.
        update_rms: by how much their entries may move in a step at most, whatever AdamW does.
    """

    patience: int = 3
    update_to_weight: float = 0.1
    logits: float = 30.0
    growth: float = 1.3
    stable_rank: float = 1.05
    apart: float = 4.0
    behind: float = 0.1
    update_rms: float = 1e-2


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that is probably wrong with a run."""

    kind: str  # "update too large", "logits grow", "stopped moving", "rank one" or "lr convention"
    where: str  # matrix, layer or param groups
    step: int
    text: str  # what it means and what to do

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


class Health:
    """Reads the measurements of a run, one after the other, and says what is wrong.

    Example::

        health = Health()
        for alarm in health.check(optimizer.metrics()):
            print(alarm)
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.alarms: list[Alarm] = []  # all so far
        self._streaks: dict[tuple[str, str], int] = {}  # number of successive measurements that show it
        self._logits: dict[str, list[float]] = {}
        self._last_step: int | None = None

    def check(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that a new measurement raises; each once, until it has been healthy in between.

        A measurement that was seen before, an empty one, or one of a skipped step raises none.
        """
        if not metrics or metrics["skipped"] or metrics["step"] == self._last_step:
            return []
        self._last_step = metrics["step"]
        signs = [sign for name, values in metrics["matrices"].items() for sign in self._of_matrix(name, values)]
        signs += [*self._of_logits(metrics["qk_clip"]), *self._of_rates(metrics)]
        found = {(kind, where): text for kind, where, text in signs}
        raised = []
        for key, text in found.items():
            self._streaks[key] = self._streaks.get(key, 0) + 1
            patience = 1 if key[0] in ("lr convention", "logits grow") else self.limits.patience
            if self._streaks[key] == patience:
                raised.append(Alarm(*key, metrics["step"], text))
        self._streaks = {key: count for key, count in self._streaks.items() if key in found}
        self.alarms += raised
        return raised

    def _of_matrix(self, name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """(kind, where, text) of everything that a measurement shows of this matrix."""
        limits, ratio, rank = self.limits, values["update_to_weight"], values["momentum_stable_rank"]
        if ratio > limits.update_to_weight and values["weight_norm"]:
            yield (
                "update too large",
                name,
                f"{name} changes by {ratio:.0%} of its norm in every step; above {limits.update_to_weight:.0%} "
                "training usually diverges. Lower the lr of its group, or warm it up for longer.",
            )
        if values["lr"] and not values["gradient_norm"]:
            yield (
                "stopped moving",
                name,
                f"{name} has a gradient of zeros: what still moves it is old momentum. Look for a branch of the model "
                "that no longer reaches the loss, a dead activation, or an expert that gets no tokens.",
            )
        elif values["lr"] and values["rounding"] == "nearest" and 0 < ratio < _LOSES_UPDATES.get(values["dtype"], 0.0):
            yield (
                "stopped moving",
                name,
                f"{name} is {values['dtype']}, and its updates of {ratio:.1e} of its norm vanish when it is rounded. "
                "Keep the "
                'weights in float32, or pass rounding="stochastic" if they are bfloat16.',
            )
        if rank < limits.stable_rank and values["momentum_norm"] and min(values["rows"], values["cols"]) > 3:
            yield (
                "rank one",
                name,
                f"{name} has a momentum of stable rank {rank:.2f}: all gradients point in one "
                "direction, and orthogonalising amplifies noise in all others. Look for a bias in the input (a mean "
                "that is not removed), a batch of equal samples, or a gradient that clipping shrinks to one outlier.",
            )

    def _of_logits(self, layers: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str, str]]:
        limits = self.limits
        for layer, values in layers.items():
            past = [*self._logits.get(layer, []), values["max_logit"]][-limits.patience - 1 :]
            self._logits[layer] = past
            rising = len(past) > limits.patience and all(a < b for a, b in itertools.pairwise(past))
            if rising and past[-1] > limits.logits and past[-1] > limits.growth * past[0]:
                yield (
                    "logits grow",
                    f"layer {layer}",
                    f"the attention logits of layer {layer} have grown from {past[0]:.0f} to {past[-1]:.0f}: softmax "
                    "is about to saturate. Lower the threshold of QK-clip, give it the logits of every step, or use "
                    "QK-norm.",
                )

    def _of_rates(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        muon = [values["update_rms"] for values in metrics["matrices"].values() if values["update_rms"]]
        adamw = [values["update_rms"] for values in metrics["adamw"].values() if values["update_rms"]]
        if not muon:
            return
        rms, limits = statistics.median(muon), self.limits
        ratio = rms / statistics.median(adamw) if adamw else 1.0
        far = rms > limits.update_rms or bool(adamw and rms > limits.apart * max(adamw))
        if not far and not (adamw and rms < limits.behind * min(adamw)):
            return
        beside = f", {ratio:.2g} times as far as those of AdamW's parameters" if adamw else ""
        yield (
            "lr convention",
            "all groups",
            f"in a step, entries of Muon's matrices move by {rms:.1e}{beside}: probably an lr of another convention. "
            'adjust_lr_fn="match_rms_adamw" takes 1 to 8 times AdamW\'s lr (1e-4 to 1.6e-2); an lr of about 0.02 '
            "belongs to "
            'adjust_lr_fn="original".',
        )
