"""Claim: rows of an online update that are planned for system prompts compute far fewer tokens than rows of neighbours.

Prompts are made up: a question of about 150 tokens behind one system prompt, or one of four, and completions of about as many.
PPO has 128 prompts of one completion, GRPO 32 of eight, SDFT 64 with a teacher's prompt of about 300 tokens more. A step is
divided into rows of 8,192 tokens on one rank and on four, with and without `least_prefix`; in both, rows are those of
`forge_packing.collate_groups`, which share prompts and what these begin with. Tokens and micro-batches are counted, nothing is
timed. The ratio is tokens without over tokens with it for PPO behind one of four system prompts of 500 tokens on four ranks;
`never_more` says that no case has more tokens or more micro-batches with it.

    python benchmarks/online_rows.py
"""

import argparse
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from _report import emit, machine, note

import forge_packing
from forge_algos.online import SelfSamples, taught_batches

SYSTEM_TOKENS = (0, 100, 500, 1500)
CASES = {"ppo": (128, 1), "grpo": (32, 8), "sdft": (64, 1)}
"""Prompts of a step, and completions of each."""


def samples_of(verb: str, system_tokens: int, systems: int, seed: int) -> SelfSamples:
    """Make up the completions of a step, with a longer prompt of the teacher for SDFT."""
    draw = np.random.default_rng(seed)
    some = lambda middle: draw.integers(3, 30_000, max(1, int(middle * draw.lognormal(0, 0.6)))).astype(np.int32)  # noqa: E731
    groups, each = CASES[verb]
    begins = [draw.integers(3, 30_000, system_tokens).astype(np.int32) for _ in range(systems)]
    chosen, asked = draw.integers(systems, size=groups), [some(150) for _ in range(groups)]
    shown = [some(300) if verb == "sdft" else np.zeros(0, np.int32) for _ in range(groups)]
    return SelfSamples(
        prompt_ids=tuple(np.concatenate([begins[at], ids]) for at, ids in zip(chosen, asked, strict=True)),
        teacher_ids=tuple(np.concatenate([begins[at], *both]) for at, *both in zip(chosen, shown, asked, strict=True)),
        groups=np.repeat(np.arange(groups), each),
        completion_ids=tuple(some(150)[:1024] for _ in range(groups * each)),
        finished=np.ones(groups * each, bool),
    )


def counted(verb: str, samples: SelfSamples, ranks: int, max_tokens: int, *, planned: bool) -> dict[str, int]:
    """Count micro-batches of a rank, tokens of all rows, and those that the ranks wait for: of each pass the longest row."""
    rows_of: list[list[int]] = []
    shards: Any = SimpleNamespace(data_parallel_size=ranks)
    for rank in range(ranks):
        batches = taught_batches(
            samples,
            max_tokens=max_tokens,
            max_keys=forge_packing.most_keys(max_tokens),
            share_prompts=True,
            least_prefix=forge_packing.LEAST_PREFIX if planned else None,
            collate=partial(forge_packing.collate_groups, share_prompt=True, share_prefix=True),
            parallel=shards,
            rank=rank,
        )
        # Verbs without a teacher have the student's row alone.
        both = [(batch.groups, batch.teacher) if verb == "sdft" else (batch.groups,) for batch in batches]
        rows_of.append([sum(len(row.input_ids) for row in rows) for rows in both])
    sizes = np.array(rows_of)
    return {"micro_batches": sizes.shape[1], "tokens": int(sizes.sum()), "slowest": int(sizes.max(axis=0).sum())}


def main() -> None:
    """Count and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of each case")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--toy", action="store_true", help="one step each: it proves nothing")
    options = parser.parse_args()
    at, steps = machine(), 1 if options.toy else options.steps
    never_more, saved = True, {}
    found: dict[str, dict[str, Any]] = {}
    for verb in CASES:
        for systems, tokens, ranks in ((k, n, r) for k in (1, 4) for n in SYSTEM_TOKENS for r in (1, 4)):
            totals: dict[bool, dict[str, int]] = {}
            for step in range(steps):
                samples = samples_of(verb, tokens, systems, step)
                one, other = (counted(verb, samples, ranks, options.max_tokens, planned=planned) for planned in (False, True))
                never_more &= all(other[name] <= one[name] for name in ("micro_batches", "tokens"))
                for planned, each in ((False, one), (True, other)):
                    totals[planned] = {name: totals.get(planned, {}).get(name, 0) + each[name] for name in each}
            name = f"{verb}, {systems} system prompt{'s' * (systems > 1)} of {tokens}, {ranks} rank{'s' * (ranks > 1)}"
            found[name] = {each: [totals[False][each], totals[True][each]] for each in totals[False]}
            saved[name] = totals[False]["tokens"] / totals[True]["tokens"]
            note(f"{name}: " + ", ".join(f"{each} {a:,} -> {b:,} ({b / a - 1:+.1%})" for each, (a, b) in found[name].items()))
    emit(
        "online_rows",
        "tokens of rows of neighbours over those of rows that are planned, PPO behind four system prompts of 500, 4 ranks",
        saved["ppo, 4 system prompts of 500, 4 ranks"],
        1.2,
        toy=options.toy,
        at=at,
        never_more=never_more,
        cases=found,
        sizes={"steps": steps, "max_tokens": options.max_tokens, "prompts_and_completions": CASES},
    )


if __name__ == "__main__":
    main()
