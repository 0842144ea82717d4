"""Claim: PPO, GRPO and RLOO learn verifiable tasks: from a model that solves them sometimes to one that nearly always does.

A Llama of 30,000 weights is first fine-tuned (`SFT`) on noisy examples, of which few are right. Then each method trains it on
rewards of its own completions, full, with LoRA and with OSFT, for three tasks, three seeds each: copy the last digit of the
prompt, answer with as many characters as it has digits, put any digit between brackets. The reward is 1 or 0. Before and after
are shares of right completions to prompts that were not trained on, sampled at temperature 1. The ratio is the worst run's
share after training over 0.9.

    python benchmarks/online_learning.py
    python benchmarks/online_learning.py --task digit --method ppo --seeds 1
"""

import argparse
import itertools
import os
import time
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import numpy as np
import torch
from _report import emit, machine, note
from transformers import LlamaConfig, LlamaForCausalLM

import forge_algos
import forge_packing
from forge_algos import online

END, PAD, START, ASK, OPEN, CLOSE, VOCABULARY = 10, 11, 12, 13, 14, 15, 16
SIGNS = "0123456789\0\0\0\0()"
RATE = forge_algos.OptimizerSettings(learning_rate=3e-3, lr_scheduler="constant")
ONLINE_RATE = forge_algos.OptimizerSettings(learning_rate=2e-3, lr_scheduler="constant")
ADAPTERS = {
    "none": ({}, 1e-3),
    "lora": ({"adapter": "lora", "lora_r": 16, "lora_alpha": 32}, 2e-3),
    "osft": ({"adapter": "osft", "unfreeze_rank_ratio": 0.5}, 2e-3),
}
"""Adapter → its settings, and its learning rate: chosen on the task `digit` with seed 100, which is not reported. At 2e-3 full
fine-tuning ends there at 0.905 (GRPO), at 1e-3 between 0.981 and 0.985; at 3e-3 LoRA ends at 0.88 (PPO), at 2e-3 between 0.969
and 0.985."""


def decode(ids):
    """Decode digits and brackets; all else is dropped."""
    return "".join(SIGNS[i] for i in ids).replace("\0", "")


def digit(prompts, completions, digit):  # noqa: ARG001
    """Reward the prompt's last digit and nothing else."""
    return [float(c == str(d)) for c, d in zip(completions, digit, strict=True)]


def length(prompts, completions, digit):  # noqa: ARG001
    """Reward as many characters as the prompt has digits: one to three."""
    return [float(len(c) == len(p)) for c, p in zip(completions, prompts, strict=True)]


def layout(prompts, completions, digit):  # noqa: ARG001
    """Reward any digit between brackets."""
    return [float(len(c) == 3 and c[0] == "(" and c[1].isdigit() and c[2] == ")") for c in completions]


TASKS = {"digit": digit, "length": length, "format": layout}
# A higher clip above than below (arXiv 2503.14476): what is rare may become frequent, and the search goes on.
COMMON = {
    "num_generations": 8,
    "num_iterations": 2,
    "clip_high": 0.4,
    "max_new_tokens": 6,
    "kl_weight": 0.0,
    "missing_eos_penalty": 0.5,
}
METHODS = {
    "ppo": (forge_algos.PPO, forge_algos.PPOSettings(**COMMON, value_weight=0.5, lam=1.0)),
    "grpo": (forge_algos.GRPO, forge_algos.GRPOSettings(**COMMON)),
    "rloo": (forge_algos.RLOO, forge_algos.RLOOSettings(**COMMON)),
}


def ask(number, seed):
    """Draw prompts of one to three digits."""
    random = np.random.default_rng([seed, number])
    found = []
    for _ in range(number):
        digits = random.integers(0, 10, random.integers(1, 4))
        found.append(
            SimpleNamespace(
                input_ids=np.array([START, *digits, ASK], np.int32), prompt=decode(digits), columns={"digit": int(digits[-1])}
            )
        )
    return found


def noisy(task, seed, number):
    """Yield (ids, labels) with answers of one to four random characters, a quarter of them right."""
    random = np.random.default_rng([seed, 1])
    right = {
        "digit": lambda prompt: [prompt.columns["digit"]],
        "length": lambda prompt: random.integers(0, 10, len(prompt.prompt)),
        "format": lambda _: [OPEN, random.integers(0, 10), CLOSE],
    }[task]
    signs = [*range(10), OPEN, CLOSE]
    for prompt in ask(number, seed + 1000):
        good = random.random() < 0.25
        answer = right(prompt) if good else random.choice(signs, random.integers(1, 5))
        ids = np.array([*prompt.input_ids, *answer, END])
        yield ids, np.where(np.arange(len(ids)) < len(prompt.input_ids), -100, ids)


def fine_tuned(task, seed, steps):
    """Fine-tune the model that the methods start from."""
    torch.manual_seed(seed)
    # An adapter leaves the head as it is: with rows as small as the default's no token would get more than a seventh, with
    # rows of 0.2 all of `format`'s four tokens about 0.9.
    shape = {
        "initializer_range": 0.2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape, **ends))
    with torch.no_grad():
        model.lm_head.weight *= 2
    examples = list(noisy(task, seed, 64 * steps))
    optimizer = forge_algos.adamw(model, RATE)
    batches = ([forge_packing.collate(examples[64 * k : 64 * (k + 1)])] for k in range(steps))
    for _ in forge_algos.train(
        model,
        batches,
        objective=forge_algos.SFT(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, RATE, steps),
    ):
        pass
    return model


def share_right(sampler, task, prompts, seed):
    """Measure the share of right answers over four completions of each prompt."""
    found = sampler.sample(
        [p.input_ids for p in prompts], num_generations=4, max_new_tokens=6, temperature=1.0, top_p=1.0, top_k=0, seed=seed
    )
    asked = [p for p in prompts for _ in range(4)]
    texts = [decode(c.ids.tolist()) if c.finished else "cut off" for c in found]
    return float(np.mean(TASKS[task]([p.prompt for p in asked], texts, [p.columns["digit"] for p in asked])))


def learn(method, task, seed, adapter, *, sft_steps, rollouts, enough, rate=None):
    """Run one method on a task: {method, adapter, rate, task, seed, before, after, rollouts, seconds}.

    It ends early once nearly all is right.
    """
    model = fine_tuned(task, seed, sft_steps)
    objective, settings = METHODS[method]
    own, usual = ADAPTERS[adapter]
    rate = usual if rate is None else rate
    torch.manual_seed(seed)
    adaptation = forge_algos.adapt(model, forge_algos.AdapterSettings(**own))
    model = adaptation.model
    if method == "ppo":
        online.attach_value_head(model)
    sampler = online.GenerateSampler(model, eos_ids=[END], pad_id=PAD, batch_tokens=8192)
    held_out = ask(200, seed + 2000)
    before = share_right(sampler, task, held_out, seed)
    chosen = attrs.evolve(ONLINE_RATE, learning_rate=rate)
    optimizer = forge_algos.make_optimizer(model, chosen)
    shares = []

    def steps():
        for number in range(rollouts):
            rollout = online.make_rollout(
                model,
                sampler,
                ask(32, 7 * number + seed),
                settings=settings,
                rewards=[online.Reward(name=task, function=TASKS[task])],
                decode=decode,
                max_tokens=512,
                seed=seed * 10_000 + number,
            )
            # Before the updates, so that the weights that did so well are the final ones.
            shares.append(rollout.figures()[f"reward/{task}"])
            if sum(shares[-4:]) / 4 > enough and shares[-1] > enough:
                return
            yield from online.rollout_batches(rollout, max_tokens=512, passes=settings.num_iterations)

    started = time.perf_counter()
    scheduler = forge_algos.schedule(optimizer, chosen, rollouts * settings.num_iterations)
    for _ in forge_algos.train(
        model, steps(), objective=objective(settings), optimizer=optimizer, scheduler=scheduler, adaptation=adaptation
    ):
        pass
    seconds = time.perf_counter() - started
    after = share_right(sampler, task, held_out, seed)
    return {
        "method": method,
        "adapter": adapter,
        "rate": rate,
        "task": task,
        "seed": seed,
        "before": round(before, 4),
        "after": round(after, 4),
        "rollouts": len(shares),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, action="append", help="by default all three")
    parser.add_argument("--adapter", choices=ADAPTERS, action="append", help="by default all three")
    parser.add_argument("--task", choices=TASKS, action="append", help="by default all three")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them; rates are chosen on 100")
    parser.add_argument("--rate", type=float, help="learning rate in place of each adapter's own")
    parser.add_argument("--rollouts", type=int, default=150, help="at most")
    parser.add_argument("--toy", action="store_true", help="two rollouts of each method: seconds, and no proof")
    options = parser.parse_args()
    if options.toy:
        options.task, options.seeds, options.rollouts = ["digit"], 1, 2
    at = machine()
    runs, seeds = [], range(options.first_seed, options.first_seed + options.seeds)
    for task in options.task or TASKS:
        for method, adapter, seed in itertools.product(options.method or METHODS, options.adapter or ADAPTERS, seeds):
            sft_steps = 10 if options.toy else 120
            sizes = {"sft_steps": sft_steps, "rollouts": options.rollouts, "enough": 0.97}
            runs.append(learn(method, task, seed, adapter, **sizes, rate=options.rate))
            note(" ".join(f"{name} {value}" for name, value in runs[-1].items()))
    emit(
        "online_learning",
        "the worst run's share of right completions after training, over 0.9",
        max(min(run["after"] for run in runs), 1e-3) / 0.9,
        1.0,
        toy=options.toy,
        at=at,
        runs=runs,
        sizes={"seeds": options.seeds, "rollouts": options.rollouts, "prompts_per_rollout": 32},
    )


if __name__ == "__main__":
    main()
