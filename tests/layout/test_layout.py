"""A layout's own words: what it refuses, what it says of itself, its axes."""

from __future__ import annotations

import pytest

from meshmuon.errors import ConfigError
from meshmuon.layout import Layout, Mesh, Placement, Replicated, Sharded

MESH = Mesh((2, 3), (4, 0, 1, 9, 5, 3))


@pytest.mark.parametrize(("shape", "ranks"), [((2, 2), (0, 1, 2)), ((2,), (0, 1, 2)), ((3,), (0, 1, 1)), ((), (0, 1))])
def test_a_mesh_needs_one_rank_per_place(shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="different ranks"):
        Mesh(shape, ranks)


@pytest.mark.parametrize("placements", [(), (Replicated(),), (Replicated(), Sharded(0), Replicated())])
def test_one_placement_per_axis(placements: tuple[Placement, ...]) -> None:
    with pytest.raises(ConfigError, match="a mesh of 2 axes"):
        Layout((4, 4), MESH, placements)


@pytest.mark.parametrize("placement", [Sharded(2), Sharded(-1), Sharded(0, 0), Sharded(1, -2)])
def test_a_placement_must_fit_the_tensor(placement: Placement) -> None:
    with pytest.raises(ConfigError, match=r"shape \(4, 4\)"):
        Layout((4, 4), MESH, (Replicated(), placement))


def test_words() -> None:
    assert str(Layout((4, 4), MESH, (Replicated(), Sharded(1)))) == "[R, S(1)] on 2×3 (ranks 4,0,1,9,5,3)"
    assert str(Layout((4,), Mesh((4,), (2, 3, 4, 5)), (Sharded(0, 2),))) == "[S(0, stride 2)] on 4 (ranks 2-5)"
    assert str(Mesh((2,), (0, 1))) == "2 (ranks 0,1)"


def test_the_text_of_a_mesh_is_made_once() -> None:
    """Reports ask for it once per parameter; with thousands of ranks that took longer than anything else."""

    class Watched(tuple[int, ...]):
        looks = 0

        def __eq__(self, other: object) -> bool:
            type(self).looks += 1
            return super().__eq__(other)

        __hash__ = tuple.__hash__

    layout = Layout((64,), Mesh((64,), Watched(range(64))), (Sharded(0),))
    before = Watched.looks
    assert [str(layout) for _ in range(3)] == ["[S(0)] on 64 (ranks 0-63)"] * 3
    assert Watched.looks == before


def test_a_scalar() -> None:
    layout = Layout((), Mesh((2,), (0, 1)), (Replicated(),))
    assert layout.local_shape(1) == ()
    assert layout.holders() == {(): [0, 1]}
