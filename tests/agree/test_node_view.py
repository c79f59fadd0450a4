"""Which ranks share a node: from the user's setting, the launcher or the host, and agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from meshmuon.agree import node_view
from meshmuon.agree.node_view import NodeView
from meshmuon.errors import ConfigError
from meshmuon.plan import Nodes, Plan
from tests.support.small_model import after, assert_equal, give_gradients, initial, muon_of, run_steps, world_mesh
from tests.support.tensors import one_text, refused
from tests.support.threads import run_threads

SETTING = "MESHMUON_RANKS_PER_NODE"
LAUNCHER = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
TWO_AND_TWO = Nodes(((0, 1), (2, 3)))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SETTING, *LAUNCHER):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("setting", ["3", "0", "2,3", "two", "2,,2", "-2", "4,0", "²"])
def test_a_setting_that_does_not_divide_the_ranks(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, setting)
    with pytest.raises(
        ConfigError, match=rf"^{SETTING}='{setting}' does not divide 4 ranks into nodes.* such as 8,8,4"
    ):
        NodeView.from_environment(0, range(4), 4)


def tell_ranks(values: Mapping[str, Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments by rank; ranks are threads of one process."""

    class Environment(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            return values[name][dist.get_rank()] if name in values else default

    monkeypatch.setattr(node_view.os, "environ", Environment())


def plans_of(hosts: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of four ranks after three steps, which must end with the bits of one device."""
    expected: list[Tensor] = after(3)
    monkeypatch.setattr(node_view.socket, "gethostname", lambda: hosts(dist.get_rank()))

    def main(rank: int) -> Plan:
        params = initial(world_mesh())
        optimizer = muon_of(params)
        run_steps(params, optimizer, range(3))
        assert_equal(params, expected)
        return optimizer.plan()

    return run_threads(4, main)


def test_hosts_are_found_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one = plans_of(lambda rank: "here", monkeypatch)
    assert {plan.options.nodes for plan in one} == {None}
    several = plans_of(lambda rank: f"host {rank % 2}", monkeypatch)
    assert {plan.options.nodes for plan in several} == {Nodes(((0, 2), (1, 3)))}
    assert len({plan.digest for plan in several}) == 1
    assert several[0].digest != one[0].digest


def test_the_setting_needs_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks know all nodes: one vote, and nobody gathers notes."""
    monkeypatch.setenv(SETTING, "2")
    monkeypatch.setattr("meshmuon.transport.agreement.all_gather_objects", None)
    assert {plan.options.nodes for plan in plans_of(lambda rank: f"host {rank}", monkeypatch)} == {TWO_AND_TWO}


def test_nodes_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank on the first node, three on the second: the first could believe in four nodes of one rank."""
    tell_ranks(dict(zip(LAUNCHER, ["1333", "0012", "0111"], strict=True)), monkeypatch)
    assert {plan.options.nodes for plan in plans_of(lambda rank: "same", monkeypatch)} == {Nodes(((0,), (1, 2, 3)))}


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        (
            ["2", "2", "4", "2"],
            "PlanMismatchError",
            f"rank 2 has {SETTING}='4' in its environment, rank 0 has '2'. Set it",
        ),
        (
            ["", "2", "2", "2"],
            "PlanMismatchError",
            f"rank 1 has {SETTING}='2' in its environment, rank 0 has ''. Set it",
        ),
        (["2", "2", "2", "3"], "ConfigError", f"rank 3: {SETTING}='3' does not divide 4 ranks into nodes"),
    ],
)
def test_ranks_that_are_told_different_things(
    settings: list[str], kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_ranks({SETTING: settings}, monkeypatch)

    def main(rank: int) -> str:
        params = initial(world_mesh())
        give_gradients(params, 0)
        optimizer = muon_of(params)
        return one_text([refused(optimizer), refused(optimizer)])

    assert one_text(run_threads(4, main)).startswith(f"{kind}: {text}")
