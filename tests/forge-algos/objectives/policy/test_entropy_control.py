"""The weight of an entropy that follows a target: naively, in a run, and resumed."""

import copy

import pytest

from forge_algos import GRPO, GRPOSettings, OptimizerSettings, adamw, schedule, train
from forge_algos.objectives.policy._entropy_control import EntropyControl
from forge_algos.online import rollout_batches

from ...digits import digit_model, rollout

GIVEN = {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 1.0, "entropy_coef_delta": 0.01}


def test_it_is_skyworks_rule():
    """Up by a step at or below the target, down above it, within bounds; read only after a step at or below it."""
    control = EntropyControl(GRPOSettings(**GIVEN, entropy_coef_min=0.01, entropy_coef_max=0.035))
    assert control.weight == 0
    found = []
    for entropy in (1.5, 0.9, 1.0, 0.5, 2.0, 1.1, 3.0):
        control.follow(entropy)
        found += [control.weight, control.state()["entropy_coef"]]
    assert found == pytest.approx([0, 0.01, 0.02, 0.02, 0.03, 0.03, 0.035, 0.035, 0, 0.025, 0, 0.015, 0, 0.01])


def test_a_step_without_the_least_certain_tokens_says_nothing_of_the_entropy():
    """Of two updates on a rollout one has the only token that learns: the other leaves the coefficient."""
    settings = GRPOSettings(**GIVEN, num_generations=4, max_new_tokens=4, top_entropy_quantile=0.0)
    model, objective = digit_model(size=0.3), GRPO(settings)
    optimizing = OptimizerSettings(learning_rate=1e-2, lr_scheduler="constant")
    optimizer = adamw(model, optimizing)
    steps = rollout_batches(rollout(model, settings), max_tokens=60, updates=2)
    options = {"objective": objective, "optimizer": optimizer, "scheduler": schedule(optimizer, optimizing, 2)}
    kept = [sum(int(batch.kept.sum()) for batch in step) for step in steps]
    found = [output.figures["entropy_coef"] for output in train(model, steps, **options)]
    assert sorted(kept) == [0, 1]
    assert found == pytest.approx([0.01, 0.01] if kept[0] else [0.02, 0.01])


def test_a_run_that_goes_on_has_the_same_bits():
    """What `state` returns after a step is all that the rest of the run needs; figures have it too."""
    settings = GRPOSettings(**{**GIVEN, "entropy_target": 9.0}, num_generations=4, max_new_tokens=4, top_entropy_quantile=0.6)
    optimizing = OptimizerSettings(learning_rate=1e-2, lr_scheduler="constant")

    def go(first, state=None):
        """Yield each step's output and the state after it."""
        model, objective = digit_model(size=0.3), GRPO(settings)
        optimizer = adamw(model, optimizing)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            objective.resume(state[2])
        steps = (rollout_batches(rollout(model, settings, seed=number), max_tokens=60)[0] for number in range(first, 4))
        options = {"objective": objective, "optimizer": optimizer, "scheduler": schedule(optimizer, optimizing, 4)}
        for output in train(model, steps, **options):
            yield output, copy.deepcopy((model.state_dict(), optimizer.state_dict(), objective.state()))

    straight = list(go(0))
    assert [output.figures["entropy_coef"] for output, _ in straight] == pytest.approx([0.03, 0.04, 0.05, 0.06])
    assert all(output.figures["kept_entropy"] > output.figures["entropy"] for output, _ in straight)
    for at in (1, 2, 3):
        for (output, _), (expected, _) in zip(go(at, straight[at - 1][1]), straight[at:], strict=True):
            assert (output.loss, output.grad_norm, output.figures) == (expected.loss, expected.grad_norm, expected.figures)
