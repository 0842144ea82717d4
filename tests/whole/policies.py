"""GRPO, RLOO and PPO by plain transformers, one completion a forward, on what a run sampled: the oracle of the online verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from forge_algos import online
from forge_algos.online.sampling._draw import inverse_cdf, uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CLIP = 0.2
KL = {"grpo": 0.1, "rloo": 0.1, "ppo": 0.05}
"""Weight of the KL divergence."""


def logits(plain: nn.Module, prompt: dict[str, torch.Tensor], completion: Any) -> torch.Tensor:
    """Logits[S, V] before each token of a completion, in a forward of its own."""
    before, more = prompt["input_ids"].shape[1], torch.tensor(np.asarray(completion), dtype=torch.int64)[None]
    # Of the tokens behind a prompt none stands for a medium; all are seen.
    given = {
        name: torch.cat([array, array.new_full((1, more.shape[1]), int(name == "attention_mask"))], 1)
        if array.shape == (1, before) and name.endswith(("input_ids", "token_type_ids", "attention_mask"))
        else array
        for name, array in prompt.items()
    }
    if (seen := prompt.get("cross_attention_mask")) is not None:
        # As `generate` goes on with Mllama's.
        given["cross_attention_mask"] = torch.cat([seen, seen[:, -1:].expand(-1, more.shape[1], -1, -1)], 1)
    given["input_ids"] = torch.cat([prompt["input_ids"], more], 1)
    return plain(**given, use_cache=False).logits[0, before - 1 : -1]


def token_logps(plain: nn.Module, prompt: dict[str, torch.Tensor], completion: Any) -> torch.Tensor:
    """The log-probability of each token."""
    found = logits(plain, prompt, completion).log_softmax(-1)
    return found.gather(1, torch.tensor(np.asarray(completion), dtype=torch.int64)[:, None])[:, 0]


class Measured(NamedTuple):
    """A completion of S tokens, as the policy that sampled it saw it."""

    old: torch.Tensor
    """Log-probabilities [S]."""
    other: torch.Tensor
    """Those of the reference [S]."""
    values: torch.Tensor
    """The value head's [S]."""


class Credit(NamedTuple):
    """A completion's advantage, [] or [S], and for a value head returns [S]."""

    advantage: torch.Tensor
    returns: torch.Tensor | None = None


def k3(logp: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Estimate of the KL divergence from another distribution (http://joschu.net/blog/kl-approx.html)."""
    return (other - logp).exp() - (other - logp) - 1


def surrogate(log_ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """The clipped ratio times the advantage (arXiv 1707.06347, equation 7)."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def credits_of(verb: str, rewards: torch.Tensor, measured: Sequence[Measured]) -> list[Credit]:
    """What each completion is worth: `rewards` [G, n] of the n completions of each of G prompts."""
    if verb == "grpo":  # arXiv 2402.03300, section 4.1.2
        scaled = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        return [Credit(each) for each in scaled.ravel()]
    if verb == "rloo":  # 2402.14740, equation 7, the KL of the whole completion in the reward
        penalties = torch.stack([KL[verb] * (each.old - each.other).sum() for each in measured])
        rewards = rewards - penalties.view_as(rewards)
        others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
        return [Credit(each) for each in (rewards - others).ravel()]
    # GAE (1506.02438, equation 16) with γ = 1 and λ = 0.95, the KL of each token in its reward; whitened.
    found, returns = [], []
    for reward, (old, other, values) in zip(rewards.ravel(), measured, strict=True):
        each = -KL[verb] * (old - other)
        each[-1] += reward
        errors = each + torch.cat([values[1:], values.new_zeros(1)]) - values
        found.append(torch.stack([sum(0.95**k * error for k, error in enumerate(errors[at:])) for at in range(len(each))]))
        returns.append(found[-1] + values)
    whole = torch.cat(found)
    return [Credit((each - whole.mean()) / (whole.std() + 1e-8), after) for each, after in zip(found, returns, strict=True)]


def terms(
    verb: str, logp: torch.Tensor, values: torch.Tensor, before: Measured, credit: Credit, value_weight: float = 0.1
) -> torch.Tensor:
    """The loss of each token [S], or of the whole completion [1]; the loss of an update is the mean of all terms."""
    if verb == "rloo":
        return -surrogate((logp - before.old).sum()[None], credit.advantage)
    loss = -surrogate(logp - before.old, credit.advantage)
    if verb == "grpo":  # a mean over the tokens (DAPO, 2503.14476, equation 8)
        return loss + KL[verb] * k3(logp, before.other)
    assert credit.returns is not None
    held = before.values + (values - before.values).clamp(-CLIP, CLIP)  # as openai/baselines, ppo2
    errors = torch.maximum((values - credit.returns).square(), (held - credit.returns).square())
    return loss + value_weight * errors / 2


def oracle(
    run: Path,
    plain: Any,
    first: Any,
    prompts: list[dict[str, torch.Tensor]],
    never: frozenset[int],
    verb: str = "grpo",
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each of two updates on both rollouts of a run of four, by torch's AdamW; `plain` is trained.

    What the run sampled, none of the tokens `never`, is what the plain model's probabilities give.
    """
    head, seen = plain.get_output_embeddings(), []
    value_head = nn.Linear(head.in_features, 1)
    nn.init.zeros_(value_head.weight)
    nn.init.zeros_(value_head.bias)

    def measure(prompt: dict[str, torch.Tensor], completion: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and values of a completion's tokens."""
        hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        logp = token_logps(plain, prompt, completion)
        hook.remove()
        return logp, value_head(seen.pop()[0, -1 - len(completion) : -1])[:, 0]

    trained = [each for each in plain.parameters() if each.requires_grad]
    trained += value_head.parameters() if verb == "ppo" else []
    optimizer, found = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0), []
    for step in (1, 3):
        rollout = online.Rollout.read(run / "rollouts" / f"step_{step}.jsonl")
        given = [
            (prompts[int(rollout.prompt_rows[group])], ids)
            for group, ids in zip(rollout.groups, rollout.completion_ids, strict=True)
        ]
        several = len(given) // len(set(rollout.groups.tolist()))
        with torch.no_grad():
            measured = []
            for at, both in enumerate(given):
                logp, values = measure(*both)
                measured.append(Measured(logp, token_logps(first, *both), values))
                scores = logits(plain, *both)
                scores[:, [*never]] = -torch.inf
                drawn = uniforms(rollout.seed, [divmod(at, several)], 7)[0, : len(both[1])]
                assert inverse_cdf(scores, drawn).tolist() == both[1].tolist()
        # AdamW's first steps make a rounded gradient near its ε a rounded step: docs/lanes/images.md.
        np.testing.assert_allclose(rollout.old_logps, torch.cat([each.old for each in measured]), atol=step * 1e-5)
        np.testing.assert_allclose(rollout.ref_logps, torch.cat([each.other for each in measured]), atol=1e-5)
        credits = credits_of(verb, torch.tensor(rollout.rewards).view(-1, several), measured)
        for _ in range(2):
            optimizer.zero_grad()
            each = [terms(verb, *measure(*both), *known) for both, *known in zip(given, measured, credits, strict=True)]
            loss = torch.cat(each).mean()
            loss.backward()
            found.append((float(loss.detach()), float(nn.utils.clip_grad_norm_(trained, 0.5))))
            optimizer.step()
    return found
