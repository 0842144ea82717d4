"""Teach a tiny model to play: `python play.py game` or `python play.py calculator`, some minutes on two cores.

A Llama of 30,000 weights first learns from aimless conversations how to speak (`forge.sft`): random guesses at a number, calls
of a calculator with any numbers. Then it learns from what it is rewarded for (`forge.grpo` with an environment): a game that is
won, a sum that is right.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import calculator
import game

import forge

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "{{ '<call> {\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}' }}"
    "{% endfor %}{{ ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
GUESS = [{"role": "user", "content": "guess"}]


def random_game(draw: random.Random) -> list[dict[str, Any]]:
    """Return the conversation of a game of random guesses."""
    one, messages, done = game.Guess(), list(GUESS), False
    one.reset(prompt=GUESS, seed=0, secret=draw.choice(game.NUMBERS))
    while not done:
        messages.append({"role": "assistant", "content": str(draw.choice(game.NUMBERS))})
        observation, _, done = one.step(messages[-1])
        messages += [] if done else [{"role": "user", "content": observation}]
    return messages


def random_sum(draw: random.Random) -> list[dict[str, Any]]:
    """Return a conversation about a sum: half of them guess, half have numbers added, few of these the right ones."""
    numbers = draw.choice(calculator.SUMS)
    messages = calculator.asked(numbers)
    if draw.random() < 0.5:
        return [*messages, {"role": "assistant", "content": str(draw.randrange(28))}]
    given = tuple(number if draw.random() < 0.6 else draw.choice(calculator.NUMBERS) for number in numbers)
    total = str(sum(given))
    return [*messages, calculator.call(given), {"role": "tool", "content": total}, {"role": "assistant", "content": total}]


class Task(NamedTuple):
    """An environment and what is needed to train in it."""

    env: str
    words: tuple[str, ...]
    """What the tokenizer knows beside roles."""
    conversation: Callable[[random.Random], list[dict[str, Any]]]
    """Makes an aimless conversation."""
    conversations: int
    prompts: Callable[[random.Random], list[dict[str, Any]]]
    """Makes the rows of `forge.grpo`."""
    settings: dict[str, Any]
    """Settings of `forge.grpo`."""


TASKS = {
    "game": Task(
        env="game:Guess",
        words=("guess", "higher", "lower", *map(str, game.NUMBERS)),
        conversation=random_game,
        conversations=512,
        prompts=lambda _: [{"prompt": GUESS, "secret": secret} for secret in game.NUMBERS],
        settings={"max_turns": 3, "max_new_tokens": 24, "effective_batch_size": len(game.NUMBERS)},
    ),
    "calculator": Task(
        env="calculator:Calculator",
        words=(
            *("tool", "+", "<call>", '{"name":', '"add",', '"arguments":', '{"numbers":', "[", ",", "]}}"),
            *map(str, range(28)),
        ),
        conversation=random_sum,
        conversations=2048,
        prompts=lambda draw: [
            {"prompt": calculator.asked(numbers), "numbers": list(numbers)} for numbers in draw.sample(calculator.SUMS, 512)
        ],
        settings={"max_turns": 2, "max_new_tokens": 32, "effective_batch_size": 16},
    ),
}


def write_model(directory: Path, words: tuple[str, ...]) -> None:
    """Write an untrained model and a tokenizer of whole words."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    known = ["<pad>", "<|im_start|>", "<|im_end|>", "user", "assistant", *words]
    unknown: Any = {"unk_token": "<pad>"}
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, **unknown))
    # A number is a word of its own, also beside a bracket or a comma.
    numbers = pre_tokenizers.Split(Regex(r"\d+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), numbers])
    named: Any = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(known), max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def play(folder: str | Path, name: str, *, rollouts: int) -> list[float]:
    """Train in `folder`; return the mean reward of each rollout: the share of episodes won."""
    folder, task = Path(folder), TASKS[name]
    write_model(folder / "model", task.words)
    draw = random.Random(0)  # noqa: S311 - games, not secrets
    write(folder / "aimless.jsonl", [{"messages": task.conversation(draw)} for _ in range(task.conversations)])
    write(folder / "prompts.jsonl", task.prompts(draw))
    common = {"learning_rate": 3e-3, "lr_scheduler": "constant", "max_tokens_per_gpu": 4096, "logging_steps": 1000}
    spoken = forge.sft(
        model_path=str(folder / "model"),
        data_path=str(folder / "aimless.jsonl"),
        ckpt_output_dir=str(folder / "spoken"),
        num_epochs=6,
        effective_batch_size=64,
        **common,
    )
    forge.grpo(
        model_path=str(spoken.model_dir),
        data_path=str(folder / "prompts.jsonl"),
        ckpt_output_dir=str(folder / "played"),
        env=task.env,
        num_generations=16,
        num_iterations=2,
        max_steps=2 * rollouts,
        **task.settings,
        **common,
    )
    lines = [json.loads(line) for line in (folder / "played" / "metrics.jsonl").read_text().splitlines()]
    won = [line["rollout_reward"] for line in lines if "rollout_reward" in line]
    first, last = (sum(part) / len(part) for part in (won[:5], won[-5:]))
    print(f"won: {first:.0%} of the first five rollouts, {last:.0%} of the last five")
    return won


def write(path: Path, rows: list[Any]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--rollouts", type=int, default=120)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        play(scratch, options.task, rollouts=options.rollouts)
