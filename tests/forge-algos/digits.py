"""Shared by tests of online methods: a model that copies digits, prompts, rewards, a rollout.
The model has ~20,000 weights.
"""

from types import SimpleNamespace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forge_algos.online import GenerateSampler, Reward, make_rollout

END, PAD, START, ASK = 10, 11, 12, 13
VOCAB = 16


def digit_model(seed=0, *, attention="sdpa", size=0.0, width=32):
    """Return an untrained model over ten digits and a few signs.
    `size` scales random weights, so that logits are far from equal.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * size)
    return model.train()


def prompts(number, seed=0):
    """Return prompts of one to four digits; the last digit is the field `digit`."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        digits = random.integers(0, 10, random.integers(1, 5))
        ids = np.array([START, *digits, ASK], np.int32)
        found.append(SimpleNamespace(input_ids=ids, prompt=decode(ids.tolist()) + "?", columns={"digit": int(digits[-1])}))
    return found


def decode(ids):
    """Decode digits as digits, signs as nothing."""
    return "".join(str(i) for i in ids if i < 10)


def small(prompts, completions, digit):
    """Return how near the first digit is to the prompt's: a reward that differs a lot."""
    return [1.0 - abs(int(c[:1] or 0) - d) / 10 - 0.01 * len(c) for c, d in zip(completions, digit, strict=True)]


def copied(prompts, completions, digit):
    """Return 1 for the prompt's last digit and nothing else."""
    return [float(c == str(d)) for c, d in zip(completions, digit, strict=True)]


def sampler(model, **options):
    return GenerateSampler(model, **{"eos_ids": [END], "pad_id": PAD, "batch_tokens": 400} | options)


def rollout(model, settings, *, asked=None, reward=small, seed=3, **options):
    """Return a rollout, by default of six prompts."""
    options = {"sampler": sampler(model), "decode": decode, "max_tokens": 200} | options
    rewards = options.pop("rewards", [Reward(name="r", function=reward)])
    return make_rollout(
        model,
        options.pop("sampler"),
        prompts(6) if asked is None else asked,
        settings=settings,
        rewards=rewards,
        seed=seed,
        **options,
    )
