"""Teach a tiny model the guessing game: `python play.py`, about three minutes on two cores.

A Llama of 27,000 weights first learns from games of random guesses how to speak (`forge.sft`); it finds the number in a third
of its games. Then it plays, and learns from winning (`forge.grpo` with an environment): the best play, halving what is left,
always wins.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from game import NUMBERS, Guess

import forge

ASK = [{"role": "user", "content": "guess"}]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + ' <|im_end|> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def write_model(directory: Path) -> None:
    """Write an untrained model and a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<|im_start|>", "<|im_end|>", "user", "assistant", "guess", "higher", "lower", *map(str, NUMBERS)]
    unknown: Any = {"unk_token": "<pad>"}
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, **unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named: Any = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(words), max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def random_game(draw: random.Random) -> dict[str, Any]:
    """Return the conversation of a game of random guesses."""
    game, messages, done = Guess(), list(ASK), False
    game.reset(prompt=ASK, seed=0, secret=draw.choice(NUMBERS))
    while not done:
        messages.append({"role": "assistant", "content": str(draw.choice(NUMBERS))})
        observation, _, done = game.step(messages[-1])
        messages += [] if done else [{"role": "user", "content": observation}]
    return {"messages": messages}


def play(folder: str | Path, *, rollouts: int = 120) -> list[float]:
    """Train in `folder`; return the share of games won in each rollout."""
    folder = Path(folder)
    write_model(folder / "model")
    draw = random.Random(0)  # noqa: S311 - games, not secrets
    write(folder / "games.jsonl", [random_game(draw) for _ in range(512)])
    write(folder / "secrets.jsonl", [{"prompt": ASK, "secret": secret} for secret in NUMBERS])
    common = {"learning_rate": 3e-3, "lr_scheduler": "constant", "max_tokens_per_gpu": 4096, "logging_steps": 1000}
    spoken = forge.sft(
        model_path=str(folder / "model"),
        data_path=str(folder / "games.jsonl"),
        ckpt_output_dir=str(folder / "spoken"),
        num_epochs=6,
        effective_batch_size=64,
        **common,
    )
    forge.grpo(
        model_path=str(spoken.model_dir),
        data_path=str(folder / "secrets.jsonl"),
        ckpt_output_dir=str(folder / "played"),
        env="game:Guess",
        max_turns=3,
        max_new_tokens=24,
        num_generations=16,
        effective_batch_size=len(NUMBERS),
        num_iterations=2,
        max_steps=2 * rollouts,
        **common,
    )
    lines = [json.loads(line) for line in (folder / "played" / "metrics.jsonl").read_text().splitlines()]
    won = [line["rollout_reward"] for line in lines if "rollout_reward" in line]
    print(f"games won: {sum(won[:5]) / 5:.0%} of the first five rollouts, {sum(won[-5:]) / 5:.0%} of the last five")
    return won


def write(path: Path, rows: list[Any]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=120, help="of 112 games each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        play(scratch, rollouts=options.rollouts)
