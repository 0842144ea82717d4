"""Claim: on a CPU, forge trains rows with images faster than TRL's `SFTTrainer` with its collator for them.

A small Gemma 3 (sliding and full attention, a SigLIP tower that is frozen on both sides) and rows of one to three made-up
pictures with a question and an answer; the answer is learned. Both sides get the same model directory and the same rows in the
same order, decode and process the pictures in every step, and have AdamW (fused), clipping at 1.0, fp32, no gradient
checkpointing, no logging, no saving. TRL pads each step's rows to the longest; forge puts rows of like lengths together, and
pads those. Each side is a process of its own; they take turns step by step (`_lockstep.py`), and the losses of the first step
must agree. Tokens are the rows' own on both sides; the ratio is TRL's seconds a token over forge's, each the median over all
steps after the warm-up.

    python benchmarks/images_vs_trl.py
"""

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _beside_trl import race_on_a_cpu, race_parser, require_trl
from _report import emit, machine
from _rows import write_samples

TEMPLATE = """{% for m in messages %}<turn>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<boi>{% else %}\
{{ c.text }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<turn>assistant
{% endif %}"""
WORDS = "what is in the picture a cat and dog under red roof beside three small boats on water near green hill".split()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = race_parser(__doc__, steps=8)
    parser.add_argument("--rows", type=int, default=16, help="rows of an optimizer step")
    parser.add_argument("--width", type=int, default=512, help="width of the decoder")
    parser.add_argument("--layers", type=int, default=6, help="layers of the decoder")
    parser.add_argument("--words", type=int, default=60, help="words of a question and its answer in the mean")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    return parser.parse_args()


def write_model(folder: Path, *, width: int, layers: int) -> Path:
    """Write a Gemma 3 with seeded random weights, and its processor: 16 tokens for a picture."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<pad>", "<end>", "<turn>", *named.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Its progress bar ends with empty lines on stdout, where the benchmark's one line belongs.
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=marks, show_progress=False)
    made.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", **named)
    tokenizer.chat_template = TEMPLATE
    images = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    names = ("boi_token_index", "eoi_token_index", "image_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids([*named.values()]), strict=True))
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128), "head_dim": 64}
    config = Gemma3Config(
        text_config={
            "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 32_000, **heads,
            "query_pre_attn_scalar": 64, "sliding_window": 64,
        },
        vision_config={
            "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 112,
            "patch_size": 14,
        },
        mm_tokens_per_image=16,
        **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_data(path: Path, *, rows: int, words: int) -> Path:
    """Write rows of prompt and completion with their pictures beside them."""
    from PIL import Image

    draw = np.random.default_rng(0)

    def text() -> str:
        number = int(np.clip(draw.lognormal(np.log(words / 2), 0.8), 3, 8 * words))
        return " ".join(draw.choice(WORDS, number))

    lines = []
    for row in range(rows):
        parts: list[dict[str, Any]] = []
        for number in range(int(draw.integers(1, 4))):
            name, encoded = f"{row}_{number}.png", io.BytesIO()
            height, width = draw.integers(80, 240, 2)
            Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(encoded, "PNG")
            (path.parent / name).write_bytes(encoded.getvalue())
            parts.append({"type": "image", "image": name})
        prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": text()}]}]
        completion = [{"role": "assistant", "content": [{"type": "text", "text": text()}]}]
        lines.append(json.dumps({"prompt": prompt, "completion": completion}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def main() -> None:
    """Measure and print the line."""
    options = arguments()
    require_trl()
    if options.toy:
        options.rows, options.width, options.layers, options.words, options.steps, options.warmup = 3, 64, 2, 8, 2, 1
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        import forge_data

        folder = Path(scratch)
        directory = write_model(folder / "model", width=options.width, layers=options.layers)
        data = write_data(folder / "rows.jsonl", rows=options.rows * steps, words=options.words)
        tokenizer = forge_data.load_tokenizer(str(directory))
        store = forge_data.prepare(data, tokenizer, folder / "store", media=True, progress=False)
        samples = [store[row] for row in range(len(store))]
        ids, labels = [sample.input_ids for sample in samples], [sample.labels for sample in samples]
        write_samples(folder / "rows.npz", ids, labels, each=options.rows)
        job = {
            "model": str(directory), "data": str(data), "store": str(folder / "store"), "adapter": "none",
            "rows": str(folder / "rows.npz"), "learning_rate": options.learning_rate,
        }  # fmt: skip
        race = race_on_a_cpu(job, folder, options, objective="_images")
        lengths = store.lengths
        longest = [int(lengths[first : first + options.rows].max()) for first in range(0, len(lengths), options.rows)]
    emit(
        "images_vs_trl",
        "tokens per second of forge's pieces over TRL's SFTTrainer on the same rows with images, on a CPU",
        race.ratio,
        1.0,
        toy=options.toy,
        at=at,
        **race.figures(),
        sizes={
            "model": f"gemma3, width {options.width}, {options.layers} layers", "rows": options.rows,
            "tokens_mean": round(float(lengths.mean()), 1), "tokens_longest": int(lengths.max()),
            "places_a_token_with_padding": round(sum(longest) * options.rows / float(lengths.sum()), 3),
            "steps": options.steps, "warmup": options.warmup, "threads": race.threads,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
