"""TRL's `DPOTrainer` as one side of a comparison, fed the same token ids, with its reference scored before training."""

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
    from trl import DPOConfig, DPOTrainer

    disable_progress_bar()
    dtype = torch.float32 if job["adapter"] == "none" else getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa")
    columns: dict[str, list[Any]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    real = []
    for samples in rows.samples:
        real.append(sum(len(sample.input_ids) for sample in samples))
        for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
            begin = int(np.argmax(chosen.labels != -100))
            columns["prompt_ids"].append(chosen.input_ids[:begin].tolist())
            columns["chosen_ids"].append(chosen.input_ids[begin:].tolist())
            columns["rejected_ids"].append(rejected.input_ids[begin:].tolist())
    config = DPOConfig(
        **arguments(job),
        per_device_train_batch_size=len(rows.samples[0]) // 2,
        max_length=None,
        precompute_ref_log_probs=True,
    )

    class Ids(DPOTrainer):
        """Trainer that takes token ids as they are."""

        def _prepare_dataset(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset

    trainer_class, reporting = paced(Ids, session, lambda step: real[step % len(real)])
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict(columns),
        processing_class=any_tokenizer(job["vocabulary"]),
        peft_config=adapter(job),
        callbacks=[reporting],
    )
    trainer.train()
