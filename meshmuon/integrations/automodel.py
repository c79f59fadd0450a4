"""NeMo Automodel: the config of an optimizer, for ``_target_`` in its YAML.

Needs ``pip install nemo-automodel``. docs/trainers_hf.md says what to write.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from nemo_automodel.components.optim.optimizer import OptimizerConfig
from torch import nn

from ..errors import UnsupportedError
from ..optim import Muon
from .factory import by_own_names, muon_for


class MuonConfig(OptimizerConfig):
    """One ``Muon`` for each part of a model, with the default param groups of that part.

    Args:
        param_group_overrides: Automodel's own: entries with ``pattern``, ``lr_mult`` and ``wd_mult``. A parameter
            follows the first entry whose pattern is found in its name. Automodel's scheduler multiplies lr and weight
            decay by them.
        options: options of ``get_default_muon_param_groups`` and of ``Muon``; ``betas`` and ``eps`` are AdamW's.

    Example::

        optimizer:
          _target_: meshmuon.integrations.automodel.MuonConfig
          lr: 1e-3
    """

    supports_megatron_fsdp_sharding: ClassVar[bool] = False  # Megatron-FSDP flattens weights

    def __init__(self, param_group_overrides: list[Any] | None = None, **options: Any) -> None:
        self._options = by_own_names(options)
        super().__init__(param_group_overrides=list(param_group_overrides or []))

    def build(self, model: nn.Module, *, device_mesh: Any = None, is_peft: bool = False) -> list[Muon]:
        """The optimizers, in the order of the parts. ``device_mesh`` and ``is_peft`` are Automodel's and not needed.

        Automodel has sharded and loaded the model by then, so that ``prepare()`` of each is called as well.
        """
        optimizers = [
            muon_for(part, keys=self._multipliers, **self._options) for part in getattr(model, "parts", [model])
        ]
        for optimizer in optimizers:
            optimizer.prepare()
        return optimizers

    def _multipliers(self, name: str) -> dict[str, Any]:
        for override in self.param_group_overrides:
            if re.search(override.pattern, name):
                return {"lr_mult": override.lr_mult, "wd_mult": override.wd_mult}
        return {}

    def build_from_param_groups(self, param_groups: Any, *, device_mesh: Any = None) -> Muon:
        """Refused: groups of parameters without names do not say which of them are embeddings and heads."""
        raise UnsupportedError(
            "this recipe of NeMo Automodel makes param groups without names, in which embeddings and heads cannot be "
            "told from matrices. Build the optimizer in a subclass of the recipe: muon_for(model, ...) of "
            "meshmuon.integrations.factory."
        )
