"""TRL's `SFTTrainer` as one side of a comparison, with everything off that is no part of training.

`packing: "rows"` feeds the rows that the other sides train on (TRL takes pre-packed rows with `padding_free`), so tokens and
losses agree row by row. `packing: "bfd"` lets TRL pack the same chats itself, as its users do. `packing: "padded"` gives it the
chats of each row as a padded batch, which is what it has for models that would mix packed ones.
"""

from collections.abc import Callable
from typing import Any

from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    import torch
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bar()
    # As on the other sides, trained weights are in fp32, a frozen base in its compute dtype.
    dtype = torch.float32 if job["adapter"] == "none" else getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation=job["trl_attention"])
    own_packing, padded = job["trl_packing"] == "bfd", job["trl_packing"] == "padded"
    if own_packing or padded:
        samples = [sample for row in rows.samples for sample in row]
        dataset = Dataset.from_dict(
            {"input_ids": [s.input_ids.tolist() for s in samples], "labels": [s.labels.tolist() for s in samples]}
        )
    else:
        dataset = Dataset.from_dict(
            {
                "input_ids": [[t for s in row for t in s.input_ids.tolist()] for row in rows.samples],
                "labels": [[t for s in row for t in s.labels.tolist()] for row in rows.samples],
                "seq_lengths": [rows.lengths(i) for i in range(len(rows.samples))],
            }
        )
    config = SFTConfig(
        **arguments(job),
        per_device_train_batch_size=len(rows.samples[0]) if padded else 1,
        packing=own_packing,
        padding_free=not padded,
        max_length=job["tokens"] if own_packing else None,
    )

    class Paced(SFTTrainer):
        """Trainer that records the loss and the tokens of each step."""

        loss_of_step = float("nan")
        tokens_of_step = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(model, inputs, *args, **kwargs)
            self.loss_of_step = result.detach()
            self.tokens_of_step = int(inputs["attention_mask"].sum()) if padded else inputs["input_ids"].numel()
            return result

    class Steps(TrainerCallback):
        """Callback that reports every step to the session, and waits for the next one."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            session.ready()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            session.step_done(tokens=trainer.tokens_of_step, loss=float(trainer.loss_of_step))

    trainer = Paced(
        model=model,
        args=config,
        train_dataset=dataset,
        processing_class=any_tokenizer(job["vocabulary"]),
        peft_config=adapter(job),
        callbacks=[Steps()],
    )
    trainer.train()


def paced(kind: Any, session: Any, tokens_of: Callable[[int], int]) -> tuple[Any, Any]:
    """Return a trainer of a kind that records the loss of each step, and the callback that reports it to the session.

    `tokens_of` is given the number of the step.
    """
    from transformers import TrainerCallback

    last: list[Any] = []

    class Paced(kind):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(model, inputs, *args, **kwargs)
            last[:] = [(result[0] if isinstance(result, tuple) else result).detach()]
            return result

    class Steps(TrainerCallback):
        done = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            session.ready()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            tokens = tokens_of(self.done)
            self.done += 1
            session.step_done(tokens=tokens, loss=float(last[0]))

    return Paced, Steps()


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of every TRL trainer: the other sides' optimizer, and everything off that is no part of training."""
    return {
        "output_dir": job["scratch"],
        "max_steps": 1_000_000,
        "gradient_accumulation_steps": 1,
        "train_sampling_strategy": "sequential",
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": job["dtype"] == "bfloat16",
        "activation_checkpointing": False,
        "use_cpu": job["device"] == "cpu",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": job["device"] != "cpu",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }


def adapter(job: dict[str, Any]) -> Any:
    """Return the adapter of the other sides, or None."""
    if job["adapter"] != "lora":
        return None
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def any_tokenizer(vocabulary: int) -> Any:
    """Make a tokenizer with a padding token and nothing else: the trainer needs one though its rows are token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": vocabulary - 1}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
