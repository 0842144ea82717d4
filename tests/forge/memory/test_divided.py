"""One rank's step → what is exchanged by ranks that divide it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import forge_accel
from forge.memory._divided import Groups, divided, shares

BLOCK = 1000
GROUPS = Groups(layers=8, block=BLOCK, root=100)


def planned(
    strategy: str = "fsdp2", *, gathers: Any = None, shard_size: int | None = None, frozen: bool = False, beside: Any = ()
) -> Any:
    """A run on four ranks."""
    parts = SimpleNamespace(beside=beside)
    settings = SimpleNamespace(strategy=SimpleNamespace(shard_size=shard_size, cp_size=1), parts=parts)
    return SimpleNamespace(
        strategy=strategy, ranks=4, settings=settings, frozen=frozen, gathers=gathers, weights=forge_accel.float32
    )


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (planned("ddp"), {}),
        (planned("fsdp2"), {"weights": 4, "unrounded": 4, "gradients": 4, "optimizer": 4}),
        (planned("hsdp", shard_size=2), {"weights": 2, "unrounded": 2, "gradients": 2, "optimizer": 2}),
        (planned("fsdp2", frozen=True), {"weights": 4, "unrounded": 4}),
        (planned("zero2", frozen=True), {"gradients": 4, "optimizer": 4}),
    ],
)
def test_what_a_strategy_divides(run: Any, found: dict[str, int]) -> None:
    """An adapter is whole on each rank of fully_shard."""
    assert shares(run) == found


@pytest.mark.parametrize(
    ("gathers", "parts", "exchanged"),
    [
        # Every block has gradients: its weights three times, the sum of the block before.
        (None, {"gradients": 8 * 4 * BLOCK}, 12 * BLOCK + 4 * BLOCK),
        (forge_accel.bfloat16, {"gradients": 8 * 4 * BLOCK}, 6 * BLOCK + BLOCK // 2 + 4 * BLOCK),
        # None has, and a block's activations are more than its gradients: these do not add up.
        (None, {"activations": 8 * 9 * BLOCK}, 12 * BLOCK),
        # They are less: the moment after the last block's is worse, by the difference.
        (None, {"activations": 8 * 2 * BLOCK}, 12 * BLOCK + (4 + 1 - 2) * BLOCK),
        # The head is done before the last block's weights are there a third time.
        (None, {"activations": 8 * 9 * BLOCK, "head": 3 * BLOCK}, 9 * BLOCK),
        (None, {"activations": 8 * 9 * BLOCK, "head": 9 * BLOCK}, 8 * BLOCK),
    ],
)
def test_what_ranks_of_a_host_exchange(gathers: Any, parts: dict[str, int], exchanged: int) -> None:
    """In bytes beside the parts of the worst moment, whose gradients are whole."""
    outside = (4 if gathers is None else 2) * 2 * GROUPS.root
    phase = divided(planned(gathers=gathers), "step", parts, GROUPS, on_host=True)
    assert phase.parts["collectives"] == exchanged + outside
    assert phase.parts["gradients"] == parts.get("gradients", 0) // 4


@pytest.mark.parametrize(("beside", "times"), [((), 1), (("vision_tower",), 2)])
def test_what_zero3_gathers_for_images(beside: Any, times: int) -> None:
    """The parts that a row without images passes over, whole, and their gradients where they train."""
    parts = {"weights": 8 * 4 * BLOCK, "gradients": 8 * 4 * BLOCK}
    made = [
        divided(planned("zero3", beside=beside), "step", parts, GROUPS._replace(beside=each), on_host=True) for each in (0, 500)
    ]
    assert made[1].parts["collectives"] - made[0].parts["collectives"] == times * 500
