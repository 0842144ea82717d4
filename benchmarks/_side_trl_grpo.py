"""TRL's `GRPOTrainer` as one side of a comparison, given recorded completions and rewards by its `rollout_func`."""

from typing import Any

import numpy as np
from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    import torch
    from _side_trl import adapter, any_tokenizer, arguments
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoModelForCausalLM, TrainerCallback
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

    class Paced(GRPOTrainer):
        """Trainer that records the loss of each step."""

        loss_of_step = float("nan")

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(model, inputs, *args, **kwargs)
            self.loss_of_step = result.detach()
            return result

    class Steps(TrainerCallback):
        """Callback that reports every step to the session, and waits for the next one."""

        done = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            session.ready()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            tokens = sum(rows.lengths(self.done % len(rows.samples)))
            self.done += 1
            session.step_done(tokens=tokens, loss=float(trainer.loss_of_step))

    trainer = Paced(
        model=model,
        args=config,
        reward_funcs=rewarded,
        rollout_func=recorded,
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(size // each * 1000)]}),
        processing_class=any_tokenizer(job["vocabulary"]),
        peft_config=adapter(job),
        callbacks=[Steps()],
    )
    trainer.train()
