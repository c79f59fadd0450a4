"""Routes every architecture of transformers, and models of timm, torchvision and diffusers: ``make test-models``.

Each model is built on the meta device, with a few layers, and checked by ``checks.py``. The result is a line of counts
and a list of problems per library; the exit code is 1 if there are any. ``--list`` names the models that could not be
built, and why.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from tests.models.checks import check_model
from tests.support import architectures

# what builds a model, and all names
LIBRARIES: dict[str, tuple[Callable[..., nn.Module], Callable[[], Iterable[Any]]]] = {
    "transformers": (architectures.build_transformers, architectures.transformers_classes),  # model type and class
    "timm": (architectures.build_timm, architectures.timm_names),
    "torchvision": (architectures.build_torchvision, architectures.torchvision_names),
    "diffusers": (architectures.build_diffusers, architectures.diffusers_names),
}
COUNTS = (
    "built",
    "not built",
    "refused",
    "problems",
    "warnings",
    "muon",
    "adamw",
    "filters",
    "expert stacks",
    "fused weights",
)


def survey(library: str, *, list_not_built: bool) -> Counter[str]:
    """Builds and checks all models of a library; prints what is wrong with them."""
    build, all_names = LIBRARIES[library]
    total: Counter[str] = Counter()
    architectures_built = set()
    for listed in all_names():
        names = (listed,) if isinstance(listed, str) else listed
        try:
            model = build(*names)
        except Exception as error:
            total["not built"] += 1
            if list_not_built:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                print(f"not built: {' '.join(names)}: {reason}", flush=True)
            continue
        findings = check_model(model)
        total.update(findings.counts)
        total.update(built=1, problems=len(findings.problems))
        total["refused"] += any(problem.startswith("refused") for problem in findings.problems)
        architectures_built.add(names[0])
        for problem in findings.problems:
            print(f"{' '.join(names)}: {problem}", flush=True)
    kinds = f", {len(architectures_built)} architectures" if library == "transformers" else ""
    print(f"{library}{kinds}: {', '.join(f'{total[name]} {name}' for name in COUNTS)}", flush=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", default=list(LIBRARIES), help="which libraries; all by default")
    parser.add_argument("--list", action="store_true", help="name the models that could not be built")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    totals = [survey(library, list_not_built=options.list) for library in options.libraries]
    return int(any(total["problems"] for total in totals))


if __name__ == "__main__":
    sys.exit(main())
