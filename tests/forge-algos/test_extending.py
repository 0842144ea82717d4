"""Extensions from outside, each added by a test and trained with; see docs/extending.md."""

import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from forge_algos import (
    GRPO,
    AdapterSettings,
    GRPOSettings,
    LossTerms,
    OptimizerSettings,
    adapt,
    make_optimizer,
    schedule,
    train,
)
from forge_algos.adaptations import ADAPTERS, Adaptation, AdapterKind
from forge_algos.losses import POLICY_KINDS, PolicyKind, policy_gradient
from forge_algos.objectives import PairObjective, TokenObjective
from forge_algos.online import Reward, load_reward, make_rollout, rollout_batches

from .digits import decode, digit_model, prompts, rollout, sampler
from .oracle import make, pack, samples
from .preferences import pair_batch, some_pairs


@pytest.fixture
def row():
    """Add rows to a table, and remove them again."""
    added = []

    def add(table, name, value):
        assert name not in table
        table[name] = value
        added.append((table, name))

    yield add
    for table, name in added:
        del table[name]


def trained(model, steps, objective, *, learning_rate=1e-2, adaptation=None):
    """Return the loss before each step."""
    settings = OptimizerSettings(learning_rate=learning_rate, lr_scheduler="constant")
    optimizer = make_optimizer(model, settings)
    scheduler = schedule(optimizer, settings, num_steps=100)
    outputs = train(model, steps, objective=objective, optimizer=optimizer, scheduler=scheduler, adaptation=adaptation)
    return [output.loss for output in outputs]


WHOLE = PolicyKind(ratio="sequence_sum", reduce="mean", grpo=True, clip=(0.05, 0.05))


def whole(new, old, ref, advantages, lengths, clip, kl_weight):
    """Return the clipped ratio of whole completions, one at a time, with GRPO's KL as a mean over its tokens."""
    terms, start = [], 0
    for advantage, length in zip(advantages, lengths, strict=True):
        own = slice(start, start + length)
        start += length
        ratio = torch.prod(new[own].exp() / old[own].exp())
        worse = min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
        quotient = (ref[own] - new[own]).exp()
        terms.append(-worse + kl_weight * (quotient - quotient.log() - 1).mean())
    return torch.stack(terms)


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_a_policy_loss_is_one_row(row, kl_weight):
    """Its row alone gives the formula's terms and gradients, on both sides of the clip, which is its own."""
    row(POLICY_KINDS, "whole", WHOLE)
    g = torch.Generator().manual_seed(1)
    lengths = [3, 1, 5, 2, 4, 6, 2, 3]
    old, ref = (-3 * torch.rand(2, sum(lengths), generator=g, dtype=torch.float64)).unbind()
    new = (old + 0.5 * torch.randn(sum(lengths), generator=g, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    extra = {"ref_logps": ref, "kl_weight": kl_weight} if kl_weight else {}
    terms = policy_gradient(new, old, advantages, lengths, kind="whole", **extra)
    expected = whole(new, old, ref, advantages, lengths, 0.05, kl_weight)
    assert terms.count == len(lengths)
    assert 0 < terms.stats["clipped_low"] + terms.stats["clipped_high"] < len(lengths)
    torch.testing.assert_close(terms.per_sample, expected)
    torch.testing.assert_close(torch.autograd.grad(terms.sum, new), torch.autograd.grad(expected.sum(), new))


def test_a_policy_loss_is_chosen_by_its_name(row):
    """Settings accept and list the new name, and the objective trains with it."""
    with pytest.raises(
        ValueError,
        match=r"'loss_type' must be in \('grpo', 'dr_grpo', .*, 'cispo', 'sapo', 'vespo', .*, 'online_ipo'\) \(got 'whole'\)",
    ):
        GRPOSettings(loss_type="whole")
    row(POLICY_KINDS, "whole", WHOLE)
    with pytest.raises(ValueError, match=r"'online_ipo', 'whole'\)"):
        GRPOSettings(loss_type="hole")
    settings = GRPOSettings(loss_type="whole", num_generations=4, max_new_tokens=4, num_iterations=2)
    objective = GRPO(settings)
    assert objective.unit == "completions"
    model = digit_model(size=0.3)
    made = rollout(model, settings)
    before = [p.detach().clone() for p in model.parameters()]
    losses = trained(model, rollout_batches(made, max_tokens=200, passes=2), objective, learning_rate=1e-3)
    assert losses[1] < losses[0]
    assert any((p != was).any() for p, was in zip(model.parameters(), before, strict=True))


def test_a_kind_of_peft_is_one_row(row):
    """GraLoRA's row gives its settings, learning rate and layers, and the loss falls."""
    row(ADAPTERS, "gralora", AdapterKind(
        learning_rate=3e-4, peft="GraloraConfig", arguments={"r": "lora_r", "alpha": "lora_alpha"}, reads=("target_modules",),
    ))  # fmt: skip
    settings = AdapterSettings(adapter="gralora", lora_r=4, lora_alpha=8, target_modules=["q_proj", "mlp"])
    with pytest.raises(ValueError, match="lora_dropout=0.1 has no effect with adapter='gralora'"):
        AdapterSettings(adapter="gralora", lora_dropout=0.1)
    with pytest.raises(ValueError, match="set adapter=lora, qlora, .* or gralora"):
        AdapterSettings(lora_r=8)
    assert OptimizerSettings().resolve("gralora").learning_rate == 3e-4
    model = make()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    adaptation = adapt(model, settings)
    assert adaptation.describe()[0].startswith("gralora of rank 4 on 8 linear layers (attention: q_proj; mlp: ")
    assert adaptation.writes == "adapter"
    assert make_optimizer(adaptation.model, OptimizerSettings()).param_groups[0]["lr"] == 3e-4
    batch = [[pack(samples((9, 7, 12)))]]
    losses = trained(adaptation.model, batch * 8, MeanLogp(), learning_rate=3e-2, adaptation=adaptation)
    assert losses[-1] < losses[0]
    plain = adaptation.model.get_base_model()
    for name, parameter in plain.named_parameters():
        if "gralora" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])


class Biases(Adaptation):
    """BitFit (arXiv 2106.10199), with a limit that is kept after each step."""

    def __init__(self, model, cap):
        super().__init__(model)
        self.cap = cap
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("bias")

    def after_step(self):
        """Clamp each bias to the limit."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data.clamp_(-self.cap, self.cap)


def biases(model, settings, context):
    """Attach BitFit; the function that a row names."""
    assert settings.adapter == "biases"
    assert context.ranks.world_size == 1
    return Biases(model, cap=0.01)


def test_an_adaptation_is_one_file_and_one_row(row):
    """A class, a function that makes it, and a row that names the function.
    `train` calls it around each step.
    """
    row(ADAPTERS, "biases", AdapterKind(learning_rate=1e-3, attach=biases))
    model = make("qwen3")
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adaptation = adapt(model, AdapterSettings(adapter="biases"))
    losses = trained(model, [[pack(samples((9, 7, 12)))]] * 6, MeanLogp(), learning_rate=5e-3, adaptation=adaptation)
    assert losses[-1] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.endswith("bias")}
    assert max(float(p.detach().abs().max()) for name, p in model.named_parameters() if name in moved) == pytest.approx(0.01)


class MeanLogp(TokenObjective):
    """The negative log-likelihood from log-probabilities, with one further figure.
    The share of tokens with a probability above one tenth.
    """

    stats = ("likely",)

    def terms(self, head, row):
        """Sum the negative log-probabilities of the learned tokens."""
        logps = head.logps(row.inputs, row.rows, row.targets)
        return LossTerms(-logps.sum(), len(logps), {"likely": (logps.detach().exp() > 0.1).sum()})


class Unlikely(TokenObjective):
    """Unlikelihood (arXiv 1908.04319): -log(1 - p) of each learned token."""

    def terms(self, head, row):
        """Sum the unlikelihoods of the learned tokens."""
        logps = head.logps(row.inputs, row.rows, row.targets)
        return LossTerms(-torch.log1p(-logps.exp()).sum(), len(logps))


def test_an_objective_on_tokens_is_one_class():
    """A class is passed to `train`; loss and gradients do not depend on the cut.
    Its figures are reported.
    """
    examples = samples((9, 7, 12, 4))
    whole, cut = [[pack(examples)]], [[pack(examples[:1]), pack(examples[1:])]]
    found = []
    for steps in (whole, cut):
        model = make()
        found.append(trained(model, steps * 4, Unlikely()))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert found[0][-1] < found[0][0]
    settings = OptimizerSettings(learning_rate=1e-2)
    model = make()
    optimizer = make_optimizer(model, settings)
    (output,) = train(
        model, whole, objective=MeanLogp(), optimizer=optimizer, scheduler=schedule(optimizer, settings, num_steps=1)
    )
    assert 0 <= output.figures["likely"] <= 1


class Hinge(PairObjective):
    """A margin of 1 between the mean log-probabilities a token."""

    def terms(self, pairs, batch):
        """Compute the margin from log-probabilities and lengths."""
        chosen, rejected = pairs.chosen / pairs.chosen_lengths, pairs.rejected / pairs.rejected_lengths
        losses = -logsigmoid(chosen - rejected - 1)
        stats = {
            "correct": chosen > rejected,
            "margins": chosen - rejected,
            "chosen_rewards": chosen,
            "rejected_rewards": rejected,
        }
        return LossTerms(losses.sum(), len(losses), {name: values.detach().float().sum() for name, values in stats.items()})


def test_an_objective_on_pairs_is_one_class():
    """A class gets the log-probabilities of both sides; the cut does not matter."""
    pairs = some_pairs(6, seed=3)
    found = [
        trained(make(), steps * 4, Hinge())
        for steps in ([[pair_batch(pairs)]], [[pair_batch(pairs[:1]), pair_batch(pairs[1:])]])
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert found[0][-1] < found[0][0]


def test_a_reward_is_a_function_in_a_file(tmp_path, monkeypatch):
    """ "module:function" is found on the path, called with the rows' fields, and learned from."""
    (tmp_path / "house_rewards.py").write_text(
        "def near(prompts, completions, digit, **columns):\n"
        "    return [1 - abs(int(c[:1] or 0) - d) / 10 for c, d in zip(completions, digit)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = GRPOSettings(num_generations=4, max_new_tokens=3, reward="house_rewards:near")
    model = digit_model(size=0.3)
    rewards = [Reward(name=name, function=load_reward(name)) for name in settings.reward]
    made = make_rollout(
        model, sampler(model), prompts(6), settings=settings, rewards=rewards, decode=decode, max_tokens=200, seed=1
    )
    assert made.scores.keys() == {"house_rewards:near"}
    assert len(set(made.rewards.tolist())) > 1
    before = model.lm_head.weight.detach().clone()
    trained(model, rollout_batches(made, max_tokens=200), GRPO(settings), learning_rate=1e-3)
    assert not torch.equal(model.lm_head.weight, before)
    sys.modules.pop("house_rewards")
