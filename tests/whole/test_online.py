"""Online methods on forge's own attention: the right distribution, shared prompts, packed rows."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge_algos
import forge_packing
from forge_algos import online
from forge_algos.online.updates._collate import collate

from ..lanes import ci_keeps
from .wiring import load

END, VOCABULARY = 2, 12
DEVICE = torch.device("cpu")
PROMPTS = (np.array([3, 4, 5]), np.array([6]), np.array([7, 8, 9, 10, 11, 3, 5]))
SYSTEM = np.arange(20) % 9 + 3
"""What prompts begin with, where they have a system message."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model of two layers whose next token is far from even."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=END, pad_token_id=0, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path := tmp_path_factory.mktemp("model"))
    return str(path)


def sampler(model, **options):
    return online.GenerateSampler(model, **({"eos_ids": [END], "pad_id": 0, "batch_tokens": 10_000} | options))


def draw(model, each, tokens, **options):
    return sampler(model, **options).sample(
        PROMPTS, num_generations=each, max_new_tokens=tokens, temperature=0.8, top_p=1.0, top_k=0, seed=1
    )


@pytest.mark.parametrize("attention", ["documents", "sdpa", "eager"])
def test_the_sampler_draws_from_the_model(directory, attention):
    """1,000 completions of each of three left-padded prompts have the model's own probabilities."""
    model = load(directory, attention)
    each = 1000
    found = draw(model, each, 2)
    for number, prompt in enumerate(PROMPTS):
        mine = found[number * each : (number + 1) * each]
        with torch.no_grad():
            first = (model(torch.tensor(prompt)[None], use_cache=False).logits[0, -1] / 0.8).softmax(-1).tolist()
            after = [
                (model(torch.tensor([[*prompt, token]]), use_cache=False).logits[0, -1] / 0.8).softmax(-1).tolist()
                for token in range(VOCABULARY)
            ]
        expected = {(END,): first[END]} | {
            (a, b): first[a] * after[a][b] for a in range(VOCABULARY) if a != END for b in range(VOCABULARY)
        }
        seen = dict.fromkeys(expected, 0)
        for completion in mine:
            seen[tuple(completion.ids.tolist())] += 1
        distance = sum(abs(seen[ids] / each - p) for ids, p in expected.items()) / 2
        noise = sum((2 * p * (1 - p) / (np.pi * each)) ** 0.5 for p in expected.values()) / 2
        assert distance < 1.5 * noise


def test_attentions_answer_alike(directory):
    """From the same seed the same completions, ten tokens long, in batches and one by one, inside the guard of `train`."""
    texts = []
    for attention in ("documents", "sdpa", "eager"):
        model = load(directory, attention)
        with forge_algos.guard_packed(model):
            texts += [[c.ids.tolist() for c in draw(model, 4, 10, batch_tokens=tokens)] for tokens in (1, 10_000)]
    assert all(text == texts[0] for text in texts)
    assert max(map(len, texts[0])) == 10


def groups(seed=0):
    """Prompts with completions, as (prompt, completions) and as whole examples."""
    random = np.random.default_rng(seed)
    some = lambda n: random.integers(3, VOCABULARY, n)  # noqa: E731
    made = [(some(p), [some(n) for n in lengths]) for p, lengths in ((4, (3, 1, 2)), (1, (5,)), (6, (2, 2, 2, 1)), (2, (1, 1)))]
    whole = [
        [(np.append(prompt, one), np.append(np.full(len(prompt), -100), one)) for one in completions]
        for prompt, completions in made
    ]
    return made, whole


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("which", [slice(4), slice(1, 2), slice(0)])
def test_rows_are_the_packers(share, which):
    """forge_algos' rows of known prompts equal those of forge_packing, array by array."""
    made, whole = (part[which] for part in groups())
    ours, theirs = collate(made, share_prompts=share), forge_packing.collate_groups(whole, share_prompt=share)
    names = (
        "input_ids",
        "position_ids",
        "rows",
        "targets",
        "lengths",
        "ends",
        "group_sizes",
        "cu_seqlens",
        "kv_rows",
        "cu_seqlens_k",
    )
    for name in names:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None), name
        if one is not None:
            np.testing.assert_array_equal(one, other, err_msg=name)
            assert one.dtype == other.dtype, name
    assert (ours.max_seqlen, ours.max_seqlen_k) == (theirs.max_seqlen, theirs.max_seqlen_k)


class Still(torch.optim.SGD):
    """An optimizer that updates nothing, so that gradients stay."""

    def step(self, closure: Any = None) -> None:
        """Leave the weights."""


METHODS = {
    "ppo": (forge_algos.PPO, forge_algos.PPOSettings(num_generations=3, max_new_tokens=6)),
    "grpo": (forge_algos.GRPO, forge_algos.GRPOSettings(num_generations=3, max_new_tokens=6, kl_weight=0.1)),
    "rloo": (forge_algos.RLOO, forge_algos.RLOOSettings(num_generations=3, max_new_tokens=6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps(["grpo"], list(METHODS)))
def test_shared_prompts_give_the_same(directory, name):
    """Rollout, loss and gradients are the same with shared prompts and system messages, in any rows, on documents and sdpa.

    All agree within 1e-5.
    """
    objective, settings = METHODS[name]
    across = partial(forge_packing.collate_groups, share_prompt=True, share_prefix=True)
    found, sizes = [], []
    for attention, share, most, made_by, keys, least in (
        ("sdpa", False, 60, None, None, None),
        ("documents", False, 500, None, None, None),
        ("documents", True, 500, None, None, None),
        ("documents", True, 36, None, None, None),
        ("documents", True, 500, across, None, None),
        ("documents", True, 70, across, None, None),
        ("documents", True, 500, None, 70, None),
        ("documents", True, 70, across, None, forge_packing.LEAST_PREFIX),
        ("documents", True, 70, across, 130, forge_packing.LEAST_PREFIX),
    ):
        model, frozen = load(directory, attention), load(directory, attention)
        with torch.no_grad():
            for parameter in frozen.parameters():
                parameter.mul_(0.9)
        can, why = forge_algos.shares_prompts(model, device=DEVICE)
        assert can == (attention == "documents"), why
        forge_algos.shares_prompts(frozen, device=DEVICE)
        if name == "ppo":
            online.attach_value_head(model)
        made = online.make_rollout(
            model,
            sampler(model),
            [SimpleNamespace(input_ids=np.append(SYSTEM, ids), prompt="", columns={}) for ids in PROMPTS],
            settings=settings,
            rewards=[
                online.Reward(name="r", function=lambda completions, **_: [float(len(c)) + c.count("4") for c in completions])
            ],
            decode=lambda ids: "".join(map(str, ids)),
            max_tokens=most,
            max_keys=keys,
            seed=3,
            reference=frozen,
            share_prompts=share,
            least_prefix=least,
            collate=made_by,
        )
        (update,) = online.rollout_batches(
            made, max_tokens=most, max_keys=keys, share_prompts=share, least_prefix=least, collate=made_by
        )
        sizes.append([len(batch.groups.input_ids) for batch in update])
        if share:
            assert any(batch.groups.kv_rows is not None for batch in update)
        if keys:
            assert len(update) > 1
            assert max(len(batch.groups.input_ids if (of := batch.groups.kv_rows) is None else of) for batch in update) <= keys
        optimizer = Still(model.parameters(), lr=1.0)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        (output,) = forge_algos.train(
            model, [update], objective=objective(settings), optimizer=optimizer, scheduler=constant, max_grad_norm=0
        )
        whole = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((made, output, whole))
    first, expected, gradient = found[0]
    assert len({output.tokens for _, output, _ in found}) > 1
    # What prompts have in common is a token of each; it is computed once in a row that has them all.
    assert found[4][1].tokens == found[2][1].tokens
    assert sum(sizes[4]) == sum(sizes[2]) - 2 * len(SYSTEM)
    # Rows that are planned for it hold more completions.
    assert max(sizes[7]) <= 70
    assert (len(sizes[7]), sum(sizes[7])) < (len(sizes[5]), sum(sizes[5]))
    assert len(sizes[8]) > len(sizes[7])
    for made, output, other in found[1:]:
        assert made.completion_texts == first.completion_texts
        np.testing.assert_allclose(made.old_logps, first.old_logps, rtol=0, atol=1e-5)
        assert output.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)
        assert float((other - gradient).norm() / gradient.norm()) < 1e-5
    assert first.figures()["kl"] != 0
