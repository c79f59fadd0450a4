"""The spectra of the accuracy table are what they are called, and its error is the one that theory gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from accuracy import LEAST, SPECTRA, matrix_with, worst_error
from contenders import CONTENDERS, LR, error_by_svd
from peers import PEERS, find_peer

from meshmuon import keller, orthogonalize, polar_express
from meshmuon.ortho import Scheme, halley, hybrid, zolotarev

BY_NAME = {contender.name: contender for contender in CONTENDERS}


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra_lie_in_the_promised_range_and_reach_its_end(name: str) -> None:
    values = SPECTRA[name](32)
    relative = values[values > 0] / values.norm()
    assert LEAST <= float(relative.min()) <= 1.1 * LEAST
    assert torch.allclose(torch.linalg.svdvals(matrix_with(values, 32, 48).double()), values / values.norm(), atol=1e-6)


@pytest.mark.parametrize("scheme", [keller(), polar_express(), zolotarev(), halley(), hybrid()], ids=lambda scheme: scheme.name)
def test_error_is_the_schemes_own(scheme: Scheme) -> None:
    spectra = [spectrum(32) for spectrum in SPECTRA.values()]
    ended = [scheme(float(value)) for values in spectra for value in (values / values.norm())[values > 0]]
    measured = worst_error(lambda grad: orthogonalize(grad.double(), scheme, dtype=torch.float64), 32, 64)
    assert measured == pytest.approx(max(abs(value - 1) for value in ended), rel=0.01)


def test_a_contenders_step_leaves_what_its_scheme_leaves() -> None:
    direct = worst_error(lambda grad: orthogonalize(grad, "keller"), 24, 40)
    for name in ("meshmuon", "naive", "torch.optim.Muon, fp32"):
        assert error_by_svd(BY_NAME[name], 24, 40) == pytest.approx(direct, abs=1e-3)


def test_a_peer_is_found_by_the_root_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "dion"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "class Muon(torch.optim.SGD):\n"
        "    def __init__(self, params, lr, mu, weight_decay, **options):\n"
        "        super().__init__(params, lr=lr)\n"
    )
    assert find_peer(f"dion={tmp_path}") == "dion"
    param = torch.nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.ones(2, 2)
    PEERS["dion"].contender.make([param])()
    assert torch.equal(param.detach(), torch.full((2, 2), -LR))
    monkeypatch.delitem(sys.modules, "dion")


@pytest.mark.parametrize(
    ("given", "phrase"), [("dion", "write NAME=DIR"), ("other=.", "one of the names"), ("DMuon=.", "no package")]
)
def test_a_peer_that_cannot_be_is_refused(given: str, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        find_peer(given)


def test_a_peer_that_does_not_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "emerging_optimizers"
    package.mkdir()
    (package / "__init__.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ValueError, match="does not import here: No module named 'a_module_that_is_not_there'"):
        find_peer(f"Emerging-Optimizers={tmp_path}")
