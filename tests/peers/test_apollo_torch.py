"""APOLLO's steps beside those of its authors' package, given the same projections.

apollo-torch is licensed for non-commercial use, so no environment of this repository installs it:
`pip install --no-deps apollo-torch==1.0.3` beside bitsandbytes runs this file.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_algos.optimizers._apollo import Apollo, projection
from forge_algos.optimizers._rounding import rounding_key

apollo_torch = pytest.importorskip("apollo_torch", reason="apollo-torch is for non-commercial use, and installed by hand")

SHAPES, EVERY, SEED, INTERVAL = ((12, 40), (40, 12), (16, 16)), 3, 5, 1000


def given_projection(_: Any, weights: torch.Tensor, rank: int, type: str, seed: int) -> torch.Tensor:
    """The package counts parameters from 1, and its seed is that number at first: `INTERVAL` is added for each interval."""
    interval, number = divmod(seed, INTERVAL)
    P = projection(min(weights.shape), rank, rounding_key(SEED, number - 1, interval), like=weights)
    return P.T if type == "right" else P


@pytest.mark.parametrize(("scale_type", "rank"), [("channel", 4), ("tensor", 1)])
def test_steps_are_the_packages(scale_type: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps with gradients that grow, of wide, tall and square matrices, over three changes of the projections."""
    from apollo_torch import random_projector

    monkeypatch.setattr(random_projector.GradientProjector, "get_orthogonal_matrix", given_projection)
    monkeypatch.setattr(random_projector, "next_seed", lambda seed: seed + INTERVAL)
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    adam: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6}
    how = {"rank": rank, "scale": 2.0, "scale_type": scale_type}
    optimizer = Apollo([{"params": ours}], **adam, **how, update_interval=EVERY, seed=SEED)
    group = {"params": theirs, **how, "update_proj_gap": EVERY, "proj": "random", "proj_type": "std"}
    package = apollo_torch.APOLLOAdamW([group], **adam)
    for step in range(10):
        for p, other in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator) * (1 + step % 3)
            other.grad = p.grad.clone()
        optimizer.step()
        package.step()
        for p, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, other, rtol=1e-6, atol=1e-6)
