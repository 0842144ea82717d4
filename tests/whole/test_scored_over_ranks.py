"""Losses, log-probabilities, values, divergences and scores of a divided model have one process's values and gradients."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

import forge_dist

from ..ranks import run_on_ranks
from . import tiny
from .scored import Scenario, all_scored

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CLOSE = 1e-5
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"
)
STRATEGIES = [
    pytest.param({"strategy": "ddp"}, id="ddp"),
    # The head's weight, and here the tied embedding's, is given up after the forward and gathered anew for the backward pass.
    pytest.param(
        {"strategy": "fsdp2", "reshard_after_forward": "always", "activation_checkpointing": True}, id="fsdp2-resharded"
    ),
    pytest.param({"strategy": "fsdp2"}, id="fsdp2", marks=pytest.mark.lane),
    pytest.param({"strategy": "zero2"}, id="zero2", marks=[needs_deepspeed, pytest.mark.lane]),
    pytest.param({"strategy": "zero3"}, id="zero3", marks=[needs_deepspeed, pytest.mark.lane]),
]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> list[Scenario]:
    """Tied, untied, adapted, with a value head, with a teacher of another shape of head, and a reward model."""
    folder: Path = tmp_path_factory.mktemp("models")
    tied, untied = (tiny.save(name, folder / name) for name in ("llama-tied", "llama-untied"))
    return [
        Scenario(tied, ("nll", "logps", "entropy", "logps_of_one_rank", "taught"), teacher=untied),
        Scenario(untied, ("nll", "logps")),
        Scenario(untied, ("beside", "values_alone"), valued=True),
        Scenario(tied, ("logps", "taught"), lora=True, teacher=untied),
        Scenario(untied, ("beside",), lora=True, valued=True),
        Scenario(untied, ("scores",), task="reward"),
        Scenario(untied, ("scores",), task="reward", lora=True),
    ]


@pytest.fixture(scope="module")
def alone(scenarios: list[Scenario]) -> list[Any]:
    """One process, both rows."""
    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(), environ={})) as ranks:
        return all_scored(ranks, {"strategy": "single"}, scenarios)


@pytest.mark.parametrize("options", STRATEGIES)
def test_the_gradients_of_one_process(options: dict[str, Any], scenarios: list[Scenario], alone: list[Any]) -> None:
    """Two ranks with a row each have the losses and gradients of one process with both rows."""
    for found in run_on_ranks(all_scored, 2, options, scenarios):
        for scenario, ours, theirs in zip(scenarios, found, alone, strict=True):
            assert tuple(ours) == tuple(theirs) == scenario.losses
            for name, (loss, gradients) in ours.items():
                expected_loss, expected = theirs[name]
                assert loss == pytest.approx(expected_loss, rel=CLOSE)
                assert gradients.keys() == expected.keys()
                norm = sum(float(g.norm()) ** 2 for g in expected.values()) ** 0.5
                assert norm > 0
                off = {key: float((gradients[key] - g).norm()) for key, g in expected.items()}
                assert sum(e**2 for e in off.values()) ** 0.5 < CLOSE * norm, (scenario, name)
                # A small gradient is compared with a part of the whole: sums of large terms that cancel are only so exact.
                for key, gradient in expected.items():
                    assert off[key] < CLOSE * max(float(gradient.norm()), 0.1 * norm), (scenario, name, key)
