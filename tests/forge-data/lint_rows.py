"""Clean rows of every format, made from a seed, and a small tokenizer with templates for the lint's tests."""

import json
from random import Random
from typing import Any

from .families import FAMILIES

Row = dict[str, Any]

WORDS = (
    "river lamp seven quiet orange ladder window maple copper night paper garden silver clock morning button bridge yellow "
    "feather market winter basket needle harbour candle stone meadow pocket ribbon saddle thunder valley whistle anchor "
    "blanket cellar"
).split()

TOOLED = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}{% for m in messages "
    "%}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + "
    "'</think>' }}{% endif %}{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + "
    "c['function']['name'] + ' ' }}{% if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}"
    "{% else %}{{ c['function']['arguments'] | tojson }}{% endif %}{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML that writes tools, calls and reasoning, and takes roles in any order."""
MUTE = TOOLED.replace("{% if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}", "")
"""The same, but reasoning is left out."""
LATE = TOOLED.replace(
    "{{ m['content'] or '' }}",
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m['content'] or '' }}",
)
"""The last turn has an empty block of reasoning, and no other."""
OPEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""No turn has an end."""
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Refuses tool messages."""
SOME = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and not "
    "m['tool_calls'] %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] + (c['function']['arguments'] | "
    "tojson) }}{% endfor %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Marks what the assistant says, and passes over what it calls."""


def tokenizer(template: str = TOOLED) -> Any:
    """Make a small tokenizer with one of these templates; its BOS is not part of the template."""
    made = FAMILIES["phi-4"].tokenizer()
    made.chat_template = template
    return made


def words(rng: Random, least: int = 4, most: int = 12) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def turn(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def clean(rng: Random) -> Row:
    """Make a clean conversation."""
    turns = [turn(role, words(rng)) for _ in range(rng.randint(1, 3)) for role in ("user", "assistant")]
    return {"messages": ([turn("system", words(rng))] if rng.random() < 0.3 else []) + turns}


def tool(name: str) -> Row:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }


def call(name: str, arguments: Any, **more: Any) -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def tooled(rng: Random) -> Row:
    """Make a clean conversation with a call, its result and the answer."""
    name = rng.choice(WORDS)
    arguments = {"city": rng.choice(WORDS)}
    return {
        "tools": [tool(name)],
        "messages": [
            turn("user", words(rng)),
            turn("assistant", None, tool_calls=[call(name, json.dumps(arguments) if rng.random() < 0.5 else arguments)]),
            turn("tool", words(rng)),
            turn("assistant", words(rng)),
        ],
    }


def completion(rng: Random) -> Row:
    return {"prompt": words(rng) + " ", "completion": words(rng)}


def preference(rng: Random) -> Row:
    chosen, rejected = (words(rng, 5, 9) for _ in range(2))
    return {
        "prompt": [turn("user", words(rng))],
        "chosen": [turn("assistant", chosen)],
        "rejected": [turn("assistant", rejected)],
    }


def tokens(rng: Random, ends: int = 422) -> Row:
    """Make ids of letters, and a token that ends a turn."""
    size = rng.randint(6, 12)
    ids = [rng.randint(10, 90) for _ in range(size)] + [ends]
    return {"input_ids": ids, "labels": [-100] * 3 + ids[3:]}


def reply(row: Row, rng: Random) -> int:
    """Return the place of one of the answers."""
    return rng.choice([at for at, each in enumerate(row["messages"]) if each["role"] == "assistant"])


def question(row: Row, rng: Random) -> int:
    return rng.choice([at for at, each in enumerate(row["messages"]) if each["role"] == "user"])
