"""TRL's `GRPOTrainer` as one side of a comparison, given recorded completions and rewards by its `rollout_func`."""

from typing import Any

import numpy as np
from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    import torch
    from _side_trl import adapter, any_tokenizer, arguments, paced
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bar()
    dtype = torch.float32 if job["adapter"] == "none" else getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa")
    each, size = job["each"], len(rows.samples[0])
    steps = iter(range(10**9))

    def recorded(_prompts: list[Any], _trainer: Any) -> dict[str, Any]:
        samples = rows.samples[next(steps) % len(rows.samples)]
        begins = [int(np.argmax(sample.labels != -100)) for sample in samples]
        return {
            "prompt_ids": [sample.input_ids[:at].tolist() for sample, at in zip(samples, begins, strict=True)],
            "completion_ids": [sample.input_ids[at:].tolist() for sample, at in zip(samples, begins, strict=True)],
            "logprobs": None,
        }

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    config = GRPOConfig(
        **arguments(job),
        per_device_train_batch_size=size,
        num_generations=each,
        max_completion_length=job["tokens"],
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        mask_truncated_completions=False,
        shuffle_dataset=False,
        num_iterations=1,
        steps_per_generation=1,
    )

    trainer_class, reporting = paced(GRPOTrainer, session, lambda step: rows.tokens(step % len(rows.samples)))
    trainer = trainer_class(
        model=model,
        args=config,
        reward_funcs=rewarded,
        rollout_func=recorded,
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(size // each * 1000)]}),
        processing_class=any_tokenizer(job["vocabulary"]),
        peft_config=adapter(job),
        callbacks=[reporting],
    )
    trainer.train()
