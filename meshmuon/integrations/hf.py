"""Muon for Hugging Face's Trainer, for trainers that derive from it (TRL), and for Accelerate's loops."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_config

from ..errors import ConfigError, UnsupportedError
from ..metrics import flat
from ..optim import Muon
from ..params.checks import shown
from .factory import by_own_names, muon_for


class muon:  # noqa: N801  # read as what it does; Trainer asks for a class, makes an instance and calls it
    """The optimizer of a model, in the form that ``Trainer`` asks for.

    ``Trainer`` and TRL's trainers call the instance with ``(model, **options)``. As in their own AdamW, biases and
    norms have no weight decay.

    Example::

        Trainer(model, args, train_dataset=..., optimizer_cls_and_kwargs=(muon, {"lr": 1e-3, "weight_decay": 0.1}))
        Trainer(model, args, train_dataset=..., optimizer_cls_and_kwargs=(muon, {"training_args": args, "momentum":
        0.9}))
    """

    def __call__(self, model: nn.Module, training_args: TrainingArguments | None = None, **options: Any) -> Muon:
        """Builds the optimizer.

        Args:
            model: the model, sharded or not.
            training_args: where lr, weight decay, and AdamW's betas and epsilon come from, unless ``options`` has them.
            options: options of ``get_default_muon_param_groups`` and of ``Muon``.
        """
        options = {**_options_in(training_args), **by_own_names(options)}
        if "lr" not in options:
            raise ConfigError(
                "muon was given no lr, and Trainer does not pass on that of its arguments: write "
                "optimizer_cls_and_kwargs="
                '(muon, {"lr": 1e-3, "weight_decay": 0.1}), or (muon, {"training_args": args}) to take both from args.'
            )
        if deepspeed_config() is not None:
            raise UnsupportedError(
                "DeepSpeed ZeRO flattens the weights after Trainer has built the optimizer, so that there are no "
                "matrices to orthogonalise. Shard with FSDP2 instead: TrainingArguments(fsdp=True), without deepspeed."
            )
        return muon_for(model, **options)


class PrepareMuon(TrainerCallback):
    """Calls ``prepare()`` of the optimizer when training begins: the model is sharded then, and a checkpoint is loaded.

    Example::

        Trainer(model, args, callbacks=[PrepareMuon()], optimizer_cls_and_kwargs=(muon, {"lr": 1e-3}))
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer on every process."""
        muon = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        if isinstance(muon, Muon):
            muon.prepare()


class MuonMetrics(PrepareMuon):
    """Adds the measurements of an optimizer that was built with ``metrics=`` to the logs of a ``Trainer``.

    They reach everything that ``report_to`` names, under the names of ``meshmuon.metrics.flat``. Measure as often as
    the Trainer logs, or more rarely: ``metrics=args.logging_steps``. It does what ``PrepareMuon`` does as well.

    Example::

        Trainer(model, args, callbacks=[MuonMetrics()], optimizer_cls_and_kwargs=(muon, {"lr": 1e-3, "metrics": 10}))
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Adds the last measurement to ``logs``, and to the history that the Trainer saves."""
        muon = getattr(optimizer, "optimizer", optimizer)
        if logs is None or not isinstance(muon, Muon) or not muon.measures:
            return
        numbers = flat(muon.metrics())
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)


def _options_in(args: TrainingArguments | None) -> dict[str, Any]:
    """The arguments of a Trainer that mean the same for Muon. The rest of Muon's options have no counterpart there."""
    if args is None:
        return {}
    if not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"training_args={shown(args)} must be the TrainingArguments of the Trainer. Options of Muon stand beside "
            "it: "
            'optimizer_cls_and_kwargs=(muon, {"lr": 1e-3, "weight_decay": 0.1}).'
        )
    return {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "adamw_betas": (args.adam_beta1, args.adam_beta2),
        "adamw_eps": args.adam_epsilon,
    }
