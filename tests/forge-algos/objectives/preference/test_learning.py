"""Each objective raises the share of held-out pairs in which the better one is preferred.

The rule: a prompt holds one of two marks, and the better completion's tokens are from that mark's half of the vocabulary.
What is better depends on the prompt, not on which half is likelier by itself.
"""

import numpy as np
import pytest
import torch
import transformers

from forge_algos import (
    DPO,
    KTO,
    ORPO,
    DPOSettings,
    KTOSettings,
    OptimizerSettings,
    ORPOSettings,
    Reward,
    SimPO,
    SimPOSettings,
    adamw,
    evaluate,
    reference_logps,
    schedule,
    train,
)

from ....lanes import ci_keeps
from ...oracle import SIZES
from ...preferences import kto_batch, pair_batch, rotated

STEPS, PAIRS = 45, 16
MARKS = (4, 5)
HALVES = (np.arange(6, 33), np.arange(33, 60))


def ruled(number, *, seed):
    """Return (prompt, chosen, rejected): a mark anywhere among random tokens is better."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        better = int(random.integers(2))
        prompt = random.integers(6, 60, random.integers(1, 4))
        prompt[random.integers(len(prompt))] = MARKS[better]
        halves = (HALVES[better], HALVES[1 - better])
        found.append((prompt, *(random.choice(half, random.integers(1, 5)) for half in halves)))
    return found


def a_model(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(transformers.LlamaConfig(**SIZES | {"hidden_size": 32, "intermediate_size": 48}, num_labels=1))


def with_references(model, batch):
    (logps,) = reference_logps(model, [batch.groups])
    return type(batch)(groups=batch.groups, ref_logps=logps)


def desirability(model, pairs):
    """Return KTO's batch: half of the pairs give their better completion, half their worse one.
    With references of the model as it is.
    """
    good = np.arange(len(pairs)) % 2 == 0
    alone = [(p, c if well else r) for (p, c, r), well in zip(pairs, good, strict=True)]
    batch = kto_batch(alone, good, rotated(alone))
    logps, others = reference_logps(model, [batch.completions, batch.mismatched])
    return kto_batch(alone, good, rotated(alone), ref_logps=logps, ref_mismatched_logps=others)


CASES = {
    "dpo": (DPO(DPOSettings(beta=0.3)), lambda model, pairs: with_references(model, pair_batch(pairs))),
    "orpo": (ORPO(ORPOSettings(beta=1.0)), lambda _, pairs: pair_batch(pairs)),
    "simpo": (SimPO(SimPOSettings(beta=2.0, gamma=0.5)), lambda _, pairs: pair_batch(pairs)),
    "kto": (KTO(KTOSettings(beta=0.3)), desirability),
    "reward": (Reward(), lambda _, pairs: pair_batch(pairs)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps(["dpo", "kto"], list(CASES)))
def test_held_out_accuracy_rises(name):
    """Accuracy on held-out pairs rises from about a half to above 0.9; the loss falls."""
    objective, batch_of = CASES[name]
    reward = name == "reward"
    model = a_model(transformers.LlamaForSequenceClassification if reward else transformers.LlamaForCausalLM)
    held_out = [pair_batch(ruled(100, seed=1000))]
    # A language model prefers what is likelier a token, whatever it was trained with.
    judge = Reward() if reward else SimPO()
    before = evaluate(model, held_out, objective=judge).figures["accuracy"]
    settings = OptimizerSettings(learning_rate=1e-2, warmup_steps=5, lr_scheduler="linear")
    optimizer = adamw(model, settings)
    batches = [batch_of(model, ruled(PAIRS, seed=step)) for step in range(STEPS)]
    losses = [
        output.loss
        for output in train(
            model,
            ([batch] for batch in batches),
            objective=objective,
            optimizer=optimizer,
            scheduler=schedule(optimizer, settings, STEPS),
        )
    ]
    after = evaluate(model, held_out, objective=judge).figures["accuracy"]
    assert 0.3 < before < 0.7
    assert after > 0.9
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
