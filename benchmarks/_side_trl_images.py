"""TRL's `SFTTrainer` on rows with images as one side of a comparison, with its own collator for them."""

import json
from pathlib import Path
from typing import Any

from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    import torch
    from _side_trl import arguments, paced
    from datasets import Dataset, Features, Image, List, Value
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    disable_progress_bar()
    model = AutoModelForImageTextToText.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.requires_grad_(requires_grad=False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(requires_grad=True)
    config = SFTConfig(
        **arguments(job), per_device_train_batch_size=len(rows.samples[0]), max_length=None, completion_only_loss=True
    )

    trainer_class, reporting = paced(SFTTrainer, session, lambda step: rows.tokens(step % len(rows.samples)))
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=_dataset(Path(job["data"]), Dataset, Features, Image, List, Value),
        processing_class=AutoProcessor.from_pretrained(job["model"]),
        callbacks=[reporting],
    )
    trainer.train()


def _dataset(path: Path, dataset: Any, features: Any, image: Any, several: Any, value: Any) -> Any:
    """Make a data set of the rows as TRL takes them: placeholders in the prompt, pictures in a column, read when used."""
    found: dict[str, list[Any]] = {"prompt": [], "completion": [], "images": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        (question,), (answer,) = row["prompt"], row["completion"]
        pictures = [str(path.parent / part["image"]) for part in question["content"] if part["type"] == "image"]
        text = next(part["text"] for part in question["content"] if part["type"] == "text")
        found["prompt"].append([{"role": "user", "content": text}])
        found["completion"].append([{"role": "assistant", "content": answer["content"][0]["text"]}])
        found["images"].append(pictures)
    message = several({"role": value("string"), "content": value("string")})
    return dataset.from_dict(found, features=features({"prompt": message, "completion": message, "images": several(image())}))
