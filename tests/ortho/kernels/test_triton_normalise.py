"""What the Triton kernels do before and around the products, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.triton_processes import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to test")


def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted.py"))
