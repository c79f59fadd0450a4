"""Which ranks exchange a rule's numbers with the owner of a matrix."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from meshmuon.execute.rule_state import rule_state_transfers
from meshmuon.layout import Mesh, Replicated, Sharded
from meshmuon.matrices import MatrixSet
from meshmuon.plan import make_plan
from tests.support.plans import entry, options_for


@pytest.mark.parametrize("owner", range(4))
def test_an_owner_sends_itself_nothing_that_another_replica_would_have_to_send(owner: int) -> None:
    """(8, 6) over two replicas of two shards: ranks 0 and 2 hold the first half of the rows, 1 and 3 the second."""
    plan = make_plan(
        [entry(mesh=Mesh((2, 2), (0, 1, 2, 3)), placements=(Replicated(), Sharded(0)), share=True)], options_for()
    )
    plan = replace(plan, tasks=(replace(plan.tasks[0], owner=owner),))
    step_params: Any = [SimpleNamespace(matrix_set=MatrixSet(1, 8, 6), memories={"rule_memory": False})]
    gathers, scatters = rule_state_transfers(plan, 0, step_params)
    assert sorted(transfer.target for transfer in scatters) == [0, 1, 2, 3]
    assert {transfer.target for transfer in gathers} == {transfer.source for transfer in scatters} == {owner}
    senders = [transfer.source for transfer in gathers]
    assert len(senders) == 2
    assert owner in senders
