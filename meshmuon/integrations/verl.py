"""verl: an optimizer that its configuration can name. Nothing of verl is imported.

verl calls ``getattr(import_module(optimizer_impl), optimizer)(module.parameters(), lr=..., weight_decay=...,
**overrides)``, and adds ``betas`` if the name contains "adam".
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..optim import Muon
from ..torch_compat import module_behind
from .factory import by_own_names, muon_for


def muon_adamw(parameters: Any, **options: Any) -> Muon:
    """The optimizer of the module whose ``parameters()`` verl hands over: Muon for matrices, AdamW for the rest.

    verl has sharded and loaded the module by then, so that ``prepare()`` is called as well, on all ranks.

    Args:
        parameters: torch's ``module.parameters()`` as it was returned, or the module itself. The names and modules of
            the parameters are read from the module. Anything else is refused: a list does not lead to the module, and
            ``recurse=False``, a generator that was read from or a ``parameters()`` that the module's class defines
            itself may be a part of its parameters.
        options: options of ``get_default_muon_param_groups`` and of ``Muon``; ``betas`` are AdamW's.

    Example::

        actor_rollout_ref.actor.optim.optimizer_impl=meshmuon.integrations.verl
        actor_rollout_ref.actor.optim.optimizer=muon_adamw
    """
    module = module_behind(parameters)
    if module is None:
        raise ConfigError(
            f"parameters is a {type(parameters).__name__}, which does not say which module it is from, or may be only "
            "a part of its parameters; muon_adamw needs the module, or the result of torch's own module.parameters() "
            "before it is read. To train a part, call requires_grad_(False) on the rest and write muon_for(module, "
            "...) of meshmuon.integrations.factory."
        )
    optimizer = muon_for(module, **by_own_names(options))
    optimizer.prepare()
    return optimizer
