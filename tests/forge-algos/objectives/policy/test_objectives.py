"""PPO, GRPO and RLOO against references from the papers, for every cut, and resumed."""

import copy

import attrs
import numpy as np
import pytest
import torch

from forge_algos import (
    GRPO,
    PPO,
    RLOO,
    AdapterError,
    GRPOSettings,
    OptimizerSettings,
    PackedBatchError,
    PPOSettings,
    RLOOSettings,
    adamw,
    evaluate,
    schedule,
    train,
)
from forge_algos.online import Rollout, attach_value_head, rollout_batches

from ...digits import digit_model, prompts, rollout
from ...oracle import CPU, distance, gradients
from ...threads import on_threads

METHODS = {
    **{
        kind: (GRPO, GRPOSettings(loss_type=kind, num_generations=4, max_new_tokens=6, kl_weight=0.3, clip=0.1, clip_high=0.3))
        for kind in ("grpo", "dr_grpo", "dapo")
    },
    **{
        f"{kind} with entropy": (
            GRPO,
            GRPOSettings(
                loss_type=kind, num_generations=4, max_new_tokens=6, kl_weight=0.3, clip=0.1, clip_high=0.3, entropy_coef=0.7
            ),
        )
        for kind in ("grpo", "dapo")
    },
    **{
        f"{kind}{' of sequences' * bool(level)} with entropy of some": (
            GRPO,
            GRPOSettings(
                loss_type=kind,
                num_generations=4,
                max_new_tokens=6,
                kl_weight=0.3,
                clip=clip,
                clip_high=3 * clip,
                entropy_coef=0.7,
                top_entropy_quantile=0.4,
                importance_sampling_level=level,
            ),
        )
        for kind, clip, level in (
            ("dapo", 0.1, None),
            ("dapo", 0.02, "sequence"),
            ("dr_grpo", 0.02, "sequence"),
            ("gspo", 0.02, None),
            ("luspo", 0.02, None),
        )
    },
    "rloo": (RLOO, RLOOSettings(num_generations=4, max_new_tokens=6, kl_weight=0.3, clip=0.3)),
    "ppo": (PPO, PPOSettings(num_generations=4, max_new_tokens=6, kl_weight=0.3, clip=0.1, value_clip=0.1, value_weight=0.7)),
}


def policy(seed=1):
    model = digit_model(seed, size=0.3)
    linear = attach_value_head(model)
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(5))
    return model


def made_of(name, number=2):
    """Return a rollout of an older policy: ratios on both sides of the clip, other values."""
    model = policy()
    made = rollout(model, METHODS[name][1], asked=prompts(number), reference=digit_model(2, size=0.3))
    random = np.random.default_rng(0)
    away = lambda a, by: None if a is None else a + random.normal(0, by, len(a)).astype(np.float32)  # noqa: E731
    return model, attrs.evolve(made, old_logps=away(made.old_logps, 0.2), values=away(made.values, 0.2))


def reference_loss(model, made, name):
    """Return the papers' losses, one unpacked completion at a time.
    A mean over completions or tokens.
    """
    s, starts, terms, tokens, entropies = METHODS[name][1], made.starts, [], 0, []
    kind = s.kind
    kept = torch.ones(len(made.old_logps))
    if getattr(s, "top_entropy_quantile", 1) < 1:
        # 2506.01939: the tokens of the rollout before which the policy that sampled was least certain.
        with torch.no_grad():
            before = torch.cat([entropies_of(model, made, i) for i in range(len(made.groups))])
        kept = (before >= before.quantile(1 - s.top_entropy_quantile)).float()
    high = s.clip if s.clip_high is None else s.clip_high
    for i in range(len(made.groups)):
        prompt, ids = made.prompt_ids[made.groups[i]], made.completion_ids[i]
        old, ref, advantage = (
            torch.tensor(a[starts[i] : starts[i + 1]]) for a in (made.old_logps, made.ref_logps, made.advantages)
        )
        out = model(torch.tensor([[*prompt, *ids]]), output_hidden_states=True)
        at = slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        all_logps = out.logits[0, at].log_softmax(-1)
        logps = torch.stack([all_logps[t, token] for t, token in enumerate(ids)])
        entropies.append(-(all_logps.exp() * all_logps).sum(-1))
        tokens += len(ids)
        keep = kept[starts[i] : starts[i + 1]]
        if name == "rloo":
            # 2402.14740: a completion is one action.
            ratio = (logps.sum() - old.sum()).exp()
            terms.append(-torch.min(ratio * advantage[0], ratio.clamp(1 - s.clip, 1 + high) * advantage[0]))
            continue
        ratio = (logps - old).exp()
        if kind in ("gspo", "luspo") or "of sequences" in name:
            # 2507.18071, equation 7.
            ratio = (logps - old).mean().exp().expand(len(ids))
        # 1707.06347, equation 7.
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - s.clip, 1 + high) * advantage)
        if name == "ppo":
            values, before, target = (
                model.value_head(out.hidden_states[-1][0, at])[:, 0],
                *(torch.tensor(a[starts[i] : starts[i + 1]]) for a in (made.values, made.returns)),
            )
            # Equation 9, clipped as OpenAI's code does.
            clipped = before + (values - before).clamp(-s.value_clip, s.value_clip)
            terms.append((loss + 0.7 * torch.max((values - target) ** 2, (clipped - target) ** 2) / 2).sum())
            continue
        # 2402.03300, equations 3 and 4.
        loss = loss * keep + s.kl_weight * ((ref - logps).exp() - (ref - logps) - 1)
        terms.append({"grpo": loss.mean(), "gspo": loss.mean(), "dr_grpo": loss.sum() / s.max_new_tokens}.get(kind, loss.sum()))
    mean = torch.stack(terms).sum() / (len(terms) if kind in ("grpo", "dr_grpo", "gspo", "luspo", "rloo") else tokens)
    return mean - getattr(s, "entropy_coef", 0.0) * (torch.cat(entropies) * kept).sum() / kept.sum()


def entropies_of(model, made, i):
    """Return the entropy before each token of a completion."""
    prompt, ids = made.prompt_ids[made.groups[i]], made.completion_ids[i]
    logps = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


class Still(torch.optim.SGD):
    """An optimizer that moves nothing, so that gradients stay."""

    def step(self, closure=None):
        pass


def step_of(model, name, batches, **options):
    """Return (output, gradients) of one step of `train`."""
    optimizer = Still([p for p in model.parameters() if p.requires_grad], lr=1.0)
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    objective, settings = METHODS[name]
    (output,) = train(
        model, [batches], objective=objective(settings), optimizer=optimizer, scheduler=still, max_grad_norm=0, **options
    )
    return output, gradients(model)


def cut(made, sizes):
    """Return one update's micro-batches of so many completions each."""
    ends = np.cumsum(sizes)
    place = np.arange(len(made.groups))
    parts = [made.trained & (place >= end - size) & (place < end) for size, end in zip(sizes, ends, strict=True)]
    found = [rollout_batches(attrs.evolve(made, trained=part), max_tokens=1000)[0] for part in parts]
    assert [len(batches) for batches in found] == [1] * len(sizes)
    return [batch for (batch,) in found]


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_papers_whatever_the_cut(name):
    """Loss and gradients are within 1e-5 of the reference for every cut of eight completions.
    As 8x1, 4x2, 1x8, by tokens, and on two ranks.
    """
    model, made = made_of(name)
    model.zero_grad()
    loss = reference_loss(model, made, name)
    loss.backward()
    expected = loss.item()
    wanted = {n: g for n, g in gradients(model).items() if name == "ppo" or "value_head" not in n}
    longest = int(max(len(p) for p in made.prompt_ids) + made.lengths.max())
    cuts = [cut(made, sizes) for sizes in ([1] * 8, [2] * 4, [8], [3, 5])] + [rollout_batches(made, max_tokens=longest)[0]]
    for batches in cuts:
        output, found = step_of(model, name, batches)
        assert output.loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert distance({n: found[n] for n in wanted}, wanted) < 1e-5
    assert wanted["model.embed_tokens.weight"].norm() > 1e-3

    def on_rank(rank):
        mine = copy.deepcopy(model)
        if name != "ppo":
            del mine.value_head
        rank.parameters = list(mine.parameters())
        batches = rollout_batches(made, max_tokens=2 * longest, parallel=rank, rank=rank.rank)[0]
        return step_of(mine, name, batches, parallel=rank)

    for output, found in on_threads(on_rank, 2):
        assert output.loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert distance({n: found[n] for n in wanted}, wanted) < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_seven_as_four_and_three(name):
    """A group of four and three of another in two rows equal one row: gradients and figures."""
    model, made = made_of(name)
    made = attrs.evolve(made, trained=np.arange(8) != 5)
    (whole,) = rollout_batches(made, max_tokens=1000)
    parts = cut(made, [4, 4])
    assert [batch.groups.group_sizes.tolist() for batch in (*whole, *parts)] == [[4, 3], [4], [3]]
    one, other = step_of(model, name, whole), step_of(model, name, parts)
    assert distance(one[1], other[1]) < 1e-5
    assert one[0].figures == pytest.approx(other[0].figures, rel=1e-4, abs=1e-6)
    assert one[0].loss_count == (
        7 if METHODS[name][0](METHODS[name][1]).unit == "completions" else int(made.lengths[made.trained].sum())
    )
    assert (one[0].samples, other[0].samples) == (7, 7)


@pytest.mark.parametrize("name", METHODS)
def test_the_reference_depends_on_each_setting(name):
    """The reference depends on clip, settings and values, so that the comparison can fail.
    The clip binds for some tokens and not for others.
    """
    model, made = made_of(name)
    output, before = step_of(model, name, rollout_batches(made, max_tokens=1000)[0])
    assert 0 < output.figures["clipped"] < 1
    objective, settings = METHODS[name]
    further = {"ppo": {"value_weight": 0.1, "value_clip": None}, "rloo": {}}.get(name, {"kl_weight": 0.1, "clip_high": 0.05})
    further |= {"entropy_coef": 0.0} if "entropy" in name else {}
    # Of a completion with one ratio the bound binds above alone, here.
    further |= {"clip_high": 0.02} if settings.policy.ratio == "sequence_mean" else {"clip": 0.01}
    for field, value in {"temperature": 2.0, **further}.items():
        changed = attrs.evolve(settings, **{field: value})
        bound = objective(changed).bind(model, device=CPU)
        model.zero_grad()
        (batch,) = rollout_batches(made, max_tokens=1000)[0]
        terms = bound(batch, bound.measure(batch))
        (terms.sum / terms.count).backward()
        assert distance({n: g for n, g in gradients(model).items() if n in before}, before) > 1e-3, field


def test_figures_are_means_over_what_they_say():
    """Reward and length are means over completions, KL over tokens, for every method.
    A KL is reported only where it has a weight.
    """
    for name, (objective, settings) in METHODS.items():
        model, made = made_of(name)
        output, _ = step_of(model, name, rollout_batches(made, max_tokens=30)[0])
        assert output.figures["reward"] == pytest.approx(made.rewards.mean(), rel=1e-5)
        assert output.figures["length"] == pytest.approx(made.lengths.mean())
        assert output.figures["kl"] > 0
        assert 0 < output.figures["entropy"] < np.log(16)
        assert ("value_loss" in output.figures) == (name == "ppo")
        assert "kl" not in objective(attrs.evolve(settings, kl_weight=0.0)).figures(
            dict.fromkeys(objective(settings).stats, 1.0), 1
        )


def test_entropy_is_the_distributions():
    """The entropy is -Σ p log p at every predicted token, against full logits."""
    model, made = made_of("dapo")
    (batch,) = rollout_batches(made, max_tokens=1000)[0]
    _, entropy, _ = GRPO(METHODS["dapo"][1]).bind(model, device=CPU).forward(batch)
    with torch.no_grad():
        expected = [entropies_of(model, made, i) for i in range(len(made.groups))]
    torch.testing.assert_close(entropy, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_the_value_head_costs_the_policy_nothing_at_first():
    """A fresh value head returns 0, is trained, and leaves the model's logits as they were."""
    model = digit_model(size=0.3)
    ids = torch.tensor([[12, 3, 13]])
    before = model(ids).logits
    linear = attach_value_head(model)
    assert attach_value_head(model) is linear
    assert torch.equal(model(ids).logits, before)
    made = rollout(model, PPOSettings(max_new_tokens=5, kl_weight=0.0))
    assert not made.values.any()
    assert "value_head.weight" in model.state_dict()
    assert all(p.requires_grad for p in linear.parameters())


@pytest.mark.slow
def test_resumed_between_any_two_updates(tmp_path):
    """Stopped after any update and resumed from files, all is the same to the bit.
    Two rollouts of four updates each.
    """
    settings = PPOSettings(num_generations=2, max_new_tokens=5, kl_weight=0.0, num_iterations=2, updates_per_pass=2)
    optimizing = OptimizerSettings(learning_rate=1e-2, lr_scheduler="constant")

    def go(first, state=None):
        """Yield (number, output, state) of updates from `first` on.
        Rollouts are read from files where they were begun before.
        """
        model = digit_model(size=0.3)
        attach_value_head(model)
        optimizer = adamw(model, optimizing)
        scheduler = schedule(optimizer, optimizing, 8)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])

        def steps():
            for number in range(first // 4, 2):
                file = tmp_path / f"{number}.jsonl"
                if first > 4 * number:
                    made = Rollout.read(file)
                else:
                    made = rollout(model, settings, seed=number)
                    made.write(file)
                updates = rollout_batches(made, max_tokens=40, updates=2, passes=2)
                assert len(updates) == 4
                yield from updates[max(0, first - 4 * number) :]

        for at, output in enumerate(
            train(model, steps(), objective=PPO(settings), optimizer=optimizer, scheduler=scheduler), first + 1
        ):
            yield at, output, copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    straight = list(go(0))
    assert [at for at, _, _ in straight] == list(range(1, 9))
    assert len({output.loss for _, output, _ in straight}) == 8
    for at, _, state in straight[:-1]:
        rest = list(go(at, state))
        assert [number for number, _, _ in rest] == list(range(at + 1, 9))
        for (_, output, (weights, _)), (_, expected, (other, _)) in zip(rest, straight[at:], strict=True):
            assert (output.loss, output.grad_norm, output.figures) == (expected.loss, expected.grad_norm, expected.figures)
            assert all(torch.equal(weights[n], other[n]) for n in other)


def test_an_evaluation_of_a_rollout():
    """An evaluation of a held-out rollout has a training step's loss, for any cut."""
    model, made = made_of("grpo")
    objective = GRPO(METHODS["grpo"][1])
    output, _ = step_of(model, "grpo", rollout_batches(made, max_tokens=1000)[0])
    found = evaluate(model, rollout_batches(made, max_tokens=30)[0], objective=objective)
    assert found.loss == pytest.approx(output.loss, rel=1e-5)
    assert found.figures["reward"] == pytest.approx(output.figures["reward"], rel=1e-5)


def test_batches_that_do_not_fit_are_refused():
    """Arrays of another length, missing ones and a missing value head are refused by name."""
    model, made = made_of("ppo")
    (batch,) = rollout_batches(made, max_tokens=1000)[0]
    objective = PPO(METHODS["ppo"][1])
    bound = objective.bind(model, device=CPU)
    with pytest.raises(PackedBatchError, match=r"old_logps: \d+ numbers are wanted for 8 completions"):
        objective.count(attrs.evolve(batch, old_logps=batch.old_logps[1:]))
    for name in ("old_logps", "advantages", "rewards"):
        with pytest.raises(PackedBatchError, match=f"{name} is missing"):
            bound(attrs.evolve(batch, **{name: None}), [])
    with pytest.raises(PackedBatchError, match="returns is missing"):
        bound(attrs.evolve(batch, returns=None), [])
    with pytest.raises(PackedBatchError, match="ref_logps is missing"):
        bound(attrs.evolve(batch, ref_logps=None), [])
    with pytest.raises(AdapterError, match="attach_value_head"):
        objective.bind(digit_model(), device=CPU)
