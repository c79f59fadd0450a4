"""The whole orthogonalisation with the Triton kernel inside, in Triton's interpreter, beside the torch twin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernel tests need Triton: pip install 'meshmuon[kernels]'")

# The interpreter is chosen when Triton is imported, so it gets a process of its own.
CHILD = """
import torch
from meshmuon.ortho import keller, orthogonalize, polar_express
from meshmuon.ortho.kernels import products
from meshmuon.ortho.kernels.products import BlockedProducts, TritonProducts
from tests.support.bounds import orthogonalize_error
from tests.ortho.oracle import highest

products._LARGEST_SHORT_SIDE = 0  # or torch would multiply matrices as small as these
torch.manual_seed(0)
for shape, scheme in (((2, 20, 33), polar_express()), ((1, 40, 17), keller(3)), ((1, 24, 24), polar_express())):
    x = torch.randn(shape)
    for form in ("standard", "gram"):
        ours = orthogonalize(x, scheme, form=form, products=TritonProducts())
        twin = orthogonalize(x, scheme, form=form, products=BlockedProducts())
        # float32 on both sides, another order of summation
        torch.testing.assert_close(ours, twin, rtol=0, atol=2 * orthogonalize_error(x, scheme, form=form))
        half = orthogonalize(x, scheme, form=form, dtype=torch.bfloat16, products=TritonProducts())
        assert torch.linalg.matrix_norm(half, 2).max() < 1.05 * highest(scheme.steps)
wide = torch.randn(1, 8, 12, dtype=torch.float64)
exact = orthogonalize(wide, polar_express(), products=BlockedProducts())
assert torch.equal(orthogonalize(wide, polar_express(), products=TritonProducts()), exact)
print("parity holds")
"""


def test_iteration_with_the_kernel_equals_the_twin() -> None:
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "parity holds" in result.stdout
