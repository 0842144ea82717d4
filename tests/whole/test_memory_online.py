"""Online verbs: what the memory plan says of sampling and of an update beside what they take, in bytes of torch's allocator."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import forge
import forge_accel
from forge.run import _memory
from forge_algos.online import GenerateSampler

from .verbs import settings_of

if TYPE_CHECKING:
    from pathlib import Path

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 4, "kl_weight": 0.05},
    "ppo": {},
    "rloo": {"num_generations": 2, "adapter": "lora"},
}


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.parametrize("verb", CASES)
def test_sampling_and_an_update_take_what_was_planned(
    verb: str, larger_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 percent where completions are as long as they may be; a reference is counted."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    machine, took, models = forge_accel.accelerator("cpu"), [], []
    # A completion that ends early would take less.
    monkeypatch.setattr("forge.tasks._rollouts.end_ids", lambda _: [10**6])
    sample = GenerateSampler.sample

    def sampled(self: Any, *given: Any, **more: Any) -> Any:
        models.append(self._model)
        held = [*self._model.parameters(), *self._model.buffers()]
        held += [p.grad for p in self._model.parameters() if p.grad is not None]
        meter = machine.meter()
        meter.start(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values()))
        try:
            return sample(self, *given, **more)
        finally:
            took.append(meter.stop())

    monkeypatch.setattr(GenerateSampler, "sample", sampled)
    given = settings_of(verb, larger_model, tmp_path) | {"max_new_tokens": 64, "max_tokens_per_gpu": 1024, "max_steps": 4}
    given |= {"model_path": str(larger_model), "validation_split": 0.0, "ckpt_output_dir": tmp_path / "run", **CASES[verb]}
    given.pop("eval_every_steps", None)
    getattr(forge, verb)(**given)
    phases = {phase["name"]: phase for phase in json.loads((tmp_path / "run" / "memory.json").read_text())["phases"]}
    # Measured are the model and, from the second rollout on, its gradients; the plan has the optimizer and a reference too.
    rollout, model = phases["rollout"], sum(p.numel() * p.element_size() for p in models[0].parameters())
    own = rollout["planned"] - rollout["parts"]["optimizer"] - (rollout["parts"]["weights"] - model)
    update = phases["first steps"]
    print(
        verb, {"sampling": (max(took), round(own / max(took), 4)), "update": round(update["planned"] / update["measured"], 4)}
    )
    assert own == pytest.approx(max(took), rel=0.05)
    assert update["planned"] == pytest.approx(update["measured"], rel=0.05)
    assert phases["step"]["planned"] >= update["planned"]
