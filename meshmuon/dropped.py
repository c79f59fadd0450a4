"""What earlier versions had and this one has not, with what to write instead: the one place that knows of it.

A drop adds a row here. Options are refused by the constructors, names and modules where they are imported, commands and
their options by the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

OPTIONS: dict[str, str] = {
    "compile": "leave it out: compile the model, and cuda_graphs=True saves launches of the orthogonalisation",
    "expert_dims": (
        'write matrices={"layers.*.experts.w1": {"dims": "in_out"}} with the names of the experts, * for any number'
    ),
    "kernels": "leave it out; MESHMUON_KERNELS=torch (or triton) in the environment says who multiplies on a GPU",
    "reference_path": "write use_distributed_muon=True, the name that Motif's optimizer has for the reference path",
    "waves_ahead": "write warmup_step, the name that Motif's optimizer has for it",
}
"""Keyword of ``Muon`` → what to write instead."""

SAVED = {"expert_dims": "out_in"}
"""Those that param groups saved → the value that loads. States still have them: torch's loader of whole states, which
flattens them, refuses a key that the optimizer's own state lacks."""

_AT_OWNERS = (
    "rules that see the weight come back with Hyperball, at the owner of a matrix and in ten lines of plain torch; "
    "until then leave it out"
)

VALUES: dict[str, str] = {
    "comm_dtype=torch.int8": "write torch.bfloat16, which rounds less",
    "rule=hyperball": _AT_OWNERS,
    "rule=update_floor": _AT_OWNERS,
    "momentum_dtype=torch.int8": "write torch.bfloat16, or call turn_on_cpu_offload()",
}
"""Value of an option that stays, as ``option=value`` → what to write instead."""

_MUON_FOR = "write muon_for of meshmuon.integrations.factory; docs/trainers_hf.md#other-trainers has the lines"

_NO_MANIFESTS = "save and load with torch.distributed.checkpoint, and keep hashes of its files with sha256sum"
_NO_ALARMS = "optimizer.metrics() is a dict of numbers: compare them in your loop; docs/metrics.md says what is healthy"
_NO_WRITERS = "give meshmuon.metrics.flat(optimizer.metrics()) to any logger; docs/metrics.md#loggers"

NAMES: dict[str, str] = {
    "CheckpointError": _NO_MANIFESTS,
    "checkpoint.MANIFEST": _NO_MANIFESTS,
    "checkpoint.Progress": _NO_MANIFESTS,
    "checkpoint.verify": _NO_MANIFESTS,
    "checkpoint.write_manifest": _NO_MANIFESTS,
    "integrations.automodel": _MUON_FOR,
    **dict.fromkeys(("metrics.Alarm", "metrics.Health", "metrics.Limits"), _NO_ALARMS),
    **dict.fromkeys((f"metrics.{name}Writer" for name in ("", "Csv", "Jsonl", "TensorBoard")), _NO_WRITERS),
    "metrics.Metrics": "write metrics=10 to measure every 10th step; nothing else is to be set",
    "integrations.axolotl": _MUON_FOR,
    "integrations.verl": _MUON_FOR,
    "tools.predict.saved_plan": (
        "meshmuon plan --json FILE writes the figures of a plan, and optimizer.plan() is plain data"
    ),
    "tools.predict.trace": "meshmuon plan --json FILE has the timeline of the slowest and of the fastest rank",
    "Hyperball": _AT_OWNERS,
    "UpdateFloor": _AT_OWNERS,
    "WeightNumbers": _AT_OWNERS,
    "TorchMuon": (
        'Muon([{"params": matrices, "use_muon": True}], lr=lr, scheme=[(3.4445, -4.7750, 2.0315)], '
        'adjust_lr_fn="original") makes the same updates; convert_torch_state of meshmuon.checkpoint converts states.'
    ),
}
"""Public name or module below ``meshmuon``, dotted → what to use instead."""

COMMANDS: dict[str, str] = {
    "plan --waves-ahead": "write --warmup-step, as Muon's option is called",
    "plan --from-json": "plan the job's model and mesh with --model, --hf-config or --module, and --mesh",
    "plan --html": "the text has the figures on one screen, and --json FILE all of them",
    "plan --save-rates": "measure the machines: torchrun ... -m meshmuon doctor --save FILE",
    "plan --trace": "--json FILE has the timeline of the slowest and of the fastest rank",
    "sweep": "put your training into examples/sweep.py, and run that",
}
"""Command, or ``command --option`` → what to run instead."""


def refuse_name(name: str) -> None:
    """Raises if ``name``, dotted and without ``meshmuon``, was dropped.

    An ImportError, because ``from meshmuon import name`` replaces the text of an AttributeError.
    """
    if name in NAMES:
        raise ImportError(f"meshmuon.{name} is gone: {NAMES[name]}", name=f"meshmuon.{name}")


def refuse_command(arguments: Sequence[str]) -> str | None:
    """What to say of a command line that uses something dropped; None for any other."""
    for words in (arguments[:1], *([arguments[0], word.split("=")[0]] for word in arguments[1:])):
        if (written := " ".join(words)) in COMMANDS:
            return f"{written} is gone: {COMMANDS[written]}"
    return None


class _DroppedModules:
    """The last finder that ``import`` asks: whatever gets here exists nowhere."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        refuse_name(name.removeprefix("meshmuon."))
        return None


sys.meta_path.append(_DroppedModules)
