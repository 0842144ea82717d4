"""Two conflicting tasks: of the same four words, name the second, or name the longest."""

from __future__ import annotations

import random

Row = dict[str, str]

_WORDS = """
acorn anchor apple arrow autumn bakery barrel basket beach bell bicycle bird blanket boat bottle branch bread bridge brother
bucket butter button cabin candle canvas carpet castle ceiling cellar chain chair cheese cherry chimney church circle city
clock cloud coast coffee coin corner cotton cousin cradle crown curtain dawn desk dinner doctor donkey door dragon drawer
dream drum dust eagle earth engine evening farmer feather fence field finger fire fish flame flag flower forest fork fountain
fox friend fruit garden garlic gate ghost glass glove goat grain grape grass guitar hammer harbor hat hill honey horse hotel
house island jacket jar jewel journey kettle key king kitchen kite ladder lake lamp lantern lawyer leaf leather lemon letter
lion lizard market meadow melon mirror moon morning mountain mouse museum needle nest night ocean olive onion orange oven owl
paper parrot path pearl pencil pepper piano picture pillow pirate planet pocket potato prince pumpkin queen rabbit radio rain
ribbon ring river road robin rocket roof rope rose saddle salt sailor school shadow sheep ship shoe silver sister snow spoon
spring square stable star station stone storm story street sugar summer table tailor temple thunder ticket tiger tower train
tree tunnel turtle uncle valley village violin wagon wall water whale wheel willow window winter wolf wool yard
""".split()


def second(words: list[str]) -> str:
    """Answer task A."""
    return words[1]


def longest(words: list[str]) -> str:
    """Answer task B; its rows have one longest word."""
    return max(words, key=len)


QUESTIONS = {"A": ("Second", second), "B": ("Longest", longest)}


def rows(task: str, number: int, *, seed: int) -> list[Row]:
    """Draw `number` questions of task A or B with their answers; the two rules never agree on a row."""
    question, rule = QUESTIONS[task]
    draw = random.Random(f"{task} {seed}")  # noqa: S311 - an order, not a secret
    made: list[Row] = []
    while len(made) < number:
        words = draw.sample(_WORDS, 4)
        lengths = sorted(map(len, words))
        if lengths[-1] > lengths[-2] and second(words) != longest(words):
            made.append({"prompt": f"Words: {', '.join(words)}. {question}:", "completion": f" {rule(words)}"})
    return made
