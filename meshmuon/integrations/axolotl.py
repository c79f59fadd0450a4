"""axolotl: a plugin that trains with Muon, for ``plugins:`` in its YAML.

Needs ``pip install axolotl``. docs/trainers_hf.md says what to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin

from ..errors import ConfigError
from ..params.checks import shown
from .factory import by_own_names
from .hf import PrepareMuon, muon

_OTHER_GROUPS = ("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_ratio")


class MuonPlugin(BasePlugin):
    """Makes axolotl's trainer build ``Muon``. lr, weight decay, betas and epsilon are those of its configuration.

    Further options of ``Muon`` stand under ``optim_args``. The key ``optimizer`` has no effect.

    Example::

        plugins:
          - meshmuon.integrations.axolotl.MuonPlugin
        optim_args:
          momentum: 0.95
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Called by axolotl between building the trainer and training."""
        options = cfg.get("optim_args") or {}
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"optim_args={shown(options)} must be a dict of options of Muon, such as optim_args: {{momentum: "
                f"0.95}}."
            )
        by_own_names(options)  # refuses unknown ones before anything is loaded
        for name in _OTHER_GROUPS:
            if getattr(trainer.args, name, None) is not None:
                given = f"{name}={shown(getattr(trainer.args, name))}"
                raise ConfigError(f"{given} is for axolotl's own param groups, which Muon's replace: remove {name}.")
        trainer.optimizer_cls_and_kwargs = (muon, dict(options))
        trainer.add_callback(PrepareMuon())
