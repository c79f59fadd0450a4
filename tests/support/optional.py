"""Packages that the development install has, and that an environment for another torch may lack."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


def development_torch() -> str:
    """The version of torch that constraints.txt pins."""
    pinned = re.search(r"^torch==(\S+)", _CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None
    return pinned.group(1)


def need(package: str) -> ModuleType:
    """Imports an optional package; skips the module that asks only where torch is not that of the development install.

    The development install has all of them. A package that is missing there is an error, not a skipped test.
    """
    other = torch.__version__.split("+")[0] != development_torch()
    if other and importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed beside torch {torch.__version__}", allow_module_level=True)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported: no test needs the network
    declare_missing_operators()
    return importlib.import_module(package)


@cache
def declare_missing_operators() -> None:
    """Lets torchvision be imported where its binaries do not fit torch: those from PyPI need CUDA, and torch may be a
    CPU build.

    Lightning, timm and others import torchvision wherever it is installed. Without its binaries it still registers
    shape functions for two of their operators, which fails. Both are declared here without an implementation; only
    detection needs one.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))  # type: ignore[no-untyped-call]  # as torchvision will
    except OSError:
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
