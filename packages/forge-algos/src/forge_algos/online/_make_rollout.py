"""Making a rollout: prompts are sampled, rewarded, measured, and credited."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import RewardError, RolloutError
from forge_algos._parallel import ALONE, Parallel
from forge_algos.online._credit import advantages_of
from forge_algos.online._gather import gather, scatter, share_of
from forge_algos.online._measure import Reference, measure
from forge_algos.online._prompts import Prompt, check_arguments, check_completions, columns_of
from forge_algos.online.rewards._rewards import Reward, RewardInputs, score, total
from forge_algos.online.rollout._rollout import Rollout, equal_groups
from forge_algos.online.sampling._sampler import Completion, Sampler
from forge_algos.online.updates._updates import packed, token_places, update_indices
from forge_algos.settings._online import OnlineSettings


def make_rollout(
    model: nn.Module,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    *,
    settings: OnlineSettings,
    rewards: Sequence[Reward],
    decode: Callable[[list[int]], str],
    max_tokens: int,
    seed: int,
    rows: Sequence[int] | None = None,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    parallel: Parallel = ALONE,
    rank: int | None = None,
    reference: Reference | None = None,
    share_prompts: bool = False,
    source: Callable[[int], str] = "row {}".format,
) -> Rollout:
    """Sample completions of each prompt, reward them, and compute what the updates read.

    Each data shard samples and rewards its share of the prompts; afterwards every rank has the whole rollout. Log-probabilities
    are those of the pass that trains: its packed rows, its head, its temperature. So the ratio of the first update is 1. They
    are the policy's own, whatever `top_p` and `top_k` took away while sampling. `source` names a row in messages.
    """
    check_arguments(prompts, settings, rewards, reference, seed, max_tokens)
    device = next(model.parameters()).device if device is None else device
    numbers = list(range(len(prompts))) if rows is None else [int(row) for row in rows]
    if len(numbers) != len(prompts):
        raise RolloutError(f"rows: {len(prompts)} numbers are wanted, one for each prompt, not {len(numbers)}")
    each = settings.num_generations
    shard = parallel.data_parallel_rank if rank is None else rank
    share = share_of(len(prompts), shard, parallel.data_parallel_size)
    mine = sampler.sample(
        [prompt.input_ids for prompt in prompts[share]],
        num_generations=each,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=seed,
        first=share.start,
    )
    check_completions(mine, len(prompts[share]) * each, settings.max_new_tokens)
    scored = _score(mine, prompts[share], numbers[share], settings, rewards, columns_of(prompts), decode, parallel, source)
    lengths = gather([len(completion.ids) for completion in mine], parallel, shard).astype(np.int64)
    ids = gather(np.concatenate([np.zeros(0), *(completion.ids for completion in mine)]), parallel, shard).astype(np.int32)
    completion_ids = tuple(np.split(ids, lengths.cumsum()[:-1])) if len(lengths) else ()
    finished = gather([completion.finished for completion in mine], parallel, shard) > 0
    scores = {name: gather(values, parallel, shard).astype(np.float32) for name, values in scored.items()}
    reward_B = total(scores, {reward.name: reward.weight for reward in rewards})
    reward_B = (reward_B - settings.missing_eos_penalty * ~finished).astype(np.float32)
    groups = np.repeat(np.arange(len(prompts)), each)
    trained = _trained(settings, reward_B, groups, finished, len(prompts))

    prompt_ids = tuple(np.asarray(prompt.input_ids, np.int32) for prompt in prompts)
    # With the KL in the reward, masked completions are measured too: they are part of the baseline of the others.
    weighed = settings.credit == "leave_one_out" and settings.mask_truncated and settings.kl_weight > 0
    masked = ~trained & ~np.isnan(reward_B) & ~finished & weighed
    steps = [
        divided
        for which, updates in ((trained, settings.updates_per_pass), (masked, 1))
        if which.any()
        for divided in update_indices(
            groups,
            np.array([len(prompt) for prompt in prompt_ids], np.int64),
            lengths,
            which,
            seed=seed,
            updates=updates,
            passes=1,
            max_tokens=max_tokens,
            data_parallel_size=parallel.data_parallel_size,
            share_prompts=share_prompts,
        )
    ]
    parts = [indices for step in steps for indices in step[shard]]
    measured = measure(
        model,
        [packed(indices, groups, prompt_ids, completion_ids, share_prompts=share_prompts) for indices in parts],
        temperature=settings.temperature,
        device=device,
        autocast=autocast,
        reference=reference,
        with_values=settings.credit == "gae",
    )
    starts = np.append(0, lengths.cumsum())
    places = np.concatenate([np.zeros(0, np.int64), *(token_places(starts, indices) for indices in parts)])
    unknown = np.repeat(~(trained | masked), lengths)
    old_logps, ref_logps, values = (None if found is None else _whole(found, places, unknown, parallel) for found in measured)
    assert old_logps is not None
    advantages, returns = advantages_of(
        settings,
        rewards=reward_B,
        groups=groups,
        lengths=lengths,
        trained=trained,
        old_logps=old_logps,
        ref_logps=ref_logps,
        values=values,
    )
    return Rollout(
        seed=seed,
        prompt_rows=np.array(numbers, np.int64),
        prompt_ids=prompt_ids,
        prompt_texts=tuple(decode(prompt.tolist()) for prompt in prompt_ids),
        groups=groups,
        completion_ids=completion_ids,
        completion_texts=tuple(decode(completion.tolist()) for completion in completion_ids),
        finished=finished,
        scores=scores,
        rewards=reward_B,
        trained=trained,
        old_logps=old_logps,
        ref_logps=ref_logps,
        values=values,
        advantages=advantages,
        returns=returns,
    )


def _score(
    completions: Sequence[Completion],
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    settings: OnlineSettings,
    rewards: Sequence[Reward],
    columns: set[str],
    decode: Callable[[list[int]], str],
    parallel: Parallel,
    source: Callable[[int], str],
) -> dict[str, NDArray[np.float32]]:
    """Return each reward function's numbers for this rank's completions, by its name.
    An error on one rank is raised on all.
    """
    each = len(completions) // max(1, len(prompts))
    asked = [prompt for prompt in prompts for _ in range(each)]
    texts = [decode(completion.ids.tolist()) for completion in completions]
    inputs = RewardInputs(
        prompts=[prompt.prompt for prompt in asked],
        completions=[
            text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
            for text, prompt in zip(texts, asked, strict=True)
        ],
        columns={name: [prompt.columns.get(name) for prompt in asked] for name in sorted(columns)},
        rows=[row for row in rows for _ in range(each)],
        source=source,
    )
    failed: RewardError | None = None
    found: dict[str, NDArray[np.float32]] = {}
    try:
        found = {reward.name: score(reward, inputs, on_error=settings.on_reward_error) for reward in rewards}
    except RewardError as error:
        failed = error
    elsewhere = parallel.any(failed is not None)
    if failed is not None:
        raise failed
    if elsewhere:
        raise RewardError("a reward function failed on another rank; its message is in that rank's log")
    return found


def _trained(
    settings: OnlineSettings,
    rewards: NDArray[np.float32],
    groups: NDArray[np.int64],
    finished: NDArray[np.bool_],
    number: int,
) -> NDArray[np.bool_]:
    found = ~np.isnan(rewards)
    if settings.mask_truncated:
        found &= finished
    if getattr(settings, "on_equal_rewards", "keep") == "skip":
        found &= ~equal_groups(rewards, groups, number)[groups]
    return found


def _whole(
    mine: NDArray[np.float32], places: NDArray[np.int64], unknown: NDArray[np.bool_], parallel: Parallel
) -> NDArray[np.float32]:
    found = scatter(mine, places, len(unknown), parallel).astype(np.float32)
    found[unknown] = np.nan
    return found
