"""Data of the continual-learning benchmark: lines of real text, skills of the base model, and tasks that are learned later.

A row of a rule is its tag, a text, `>`, the rule's answer, `;`: `Iapple>elppa;`. Texts are words and phrases of the real
text, or digits. The skills are learned in pretraining, where the tasks are rare, and the tasks one after the other later. The
held-out eighth is never trained on. Every character is a token.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from _chats import conversations

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIGNS = " \n" + LETTERS + "0123456789.,'?!-:()>;" + LETTERS[:16].upper()
VOCABULARY = len(SIGNS)
IDS = {sign: number for number, sign in enumerate(SIGNS)}
DIGITS = "0123456789"
LONGEST = 8
"""Most letters of a word; the fewest are 4."""
ROW = 32
"""Most characters of a rule's row."""
TEXT = 48
"""Characters of a row of text."""


def _shift(letters: str, by: int) -> Callable[[str], str]:
    """Return a rule that replaces each of `letters` by the one `by` after it."""
    moved = str.maketrans(letters, letters[by:] + letters[:by])
    return lambda word: word.translate(moved)


NAMES = "alfa bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa".split()
RULES: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "A": ("word", lambda text: text),
    "B": ("word", lambda text: text[2:] + text[:2]),
    "C": ("word", _shift(LETTERS, 3)),
    "D": ("word", lambda text: "".join(a for a in text if a not in "aeiou")),
    "E": ("digits", lambda text: "".join(sorted(text, reverse=True))),
    "F": ("digits", _shift(DIGITS, 3)),
    "G": ("phrase", lambda text: "".join(word[-1] for word in text.split(" "))),
    "H": ("phrase", lambda text: text.split(" ")[1]),
    "I": ("word", lambda text: text[::-1]),
    "K": ("phrase", lambda text: "".join(word[0] for word in text.split(" "))),
    "L": ("digits", lambda text: "".join(sorted(text))),
    "P": ("tag", lambda text: NAMES[ord(text) - ord("A")]),
}
"""Tag → kind of text, and the rule: copy, rotate by two, three letters on, drop vowels, sort downwards, three digits on, last
letters, second word, reverse, first letters, sort upwards; and each tag's own name, so that all tags have a meaning before
the tasks come."""
SKILLS = "ABCDEFGHP"
TASKS = "IKL"
RARE = 0.15
"""How often pretraining shows a task for each time it shows a skill: enough that the base model does some of it."""


def read_text(directory: Path) -> list[str]:
    """Read all texts of the `.jsonl` files of `directory`, in lower case and the characters of the vocabulary."""
    found = []
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            parts = (
                [row["text"]]
                if "text" in row
                else [m["content"] for m in row.get("messages") or [*row["prompt"], *row["chosen"]]]
            )
            found.append(_known("\n".join(parts)))
    return found


def docstrings(modules: Sequence[str]) -> list[str]:
    """Return the standard library's docstrings, for use where no other text is given."""
    return [_known(turns[1]["content"]) for turns in conversations("answers", modules)]


def _known(text: str) -> str:
    """Convert to lower case, with a space for all characters outside the vocabulary."""
    return re.sub(" +", " ", re.sub(f"[^{re.escape(SIGNS[:49])}]+", " ", text.lower())).strip()


class Data:
    """Rows of text, of skills and of tasks; `held` ones are of texts that are not trained on in this way."""

    def __init__(self, texts: Sequence[str]) -> None:
        words = sorted({w for t in texts for w in re.findall("[a-z]+", t) if 4 <= len(w) <= LONGEST})
        self._words = {held: [w for w in words if (crc32(w.encode()) % 8 == 0) is held] for held in (True, False)}
        phrases = sorted(
            {p for t in texts for p in re.findall("(?=(?<![a-z'])([a-z]+(?: [a-z]+){2,3})(?![a-z']))", t) if len(p) <= 16}
        )
        self._phrases = {held: [p for p in phrases if (crc32(p.encode()) % 8 == 0) is held] for held in (True, False)}
        self._text = {held: _ids("\n".join(t for k, t in enumerate(texts) if (k % 10 == 0) is held)) for held in (True, False)}

    def text(self, rows: int, random: np.random.Generator, *, held: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (ids, labels) [rows, TEXT]: windows of the text, all of it learned."""
        text = self._text[held]
        starts = random.integers(0, len(text) - TEXT, rows)
        ids = torch.from_numpy(text[starts[:, None] + np.arange(TEXT)])
        return ids, ids

    def rule(
        self, tags: str, rows: int, random: np.random.Generator, *, held: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (ids, labels) [rows, at most ROW]: rules of `tags`, padded on the right; only answers are learned."""
        weights = np.array([RARE if tags != tag and tag in TASKS else 1.0 for tag in tags])
        ids = np.zeros((rows, ROW), np.int64)
        labels = np.full((rows, ROW), -100)
        for row, tag in enumerate(random.choice(list(tags), rows, p=weights / weights.sum())):
            kind, rule = RULES[tag]
            text = self._draw(kind, random, held)
            question = f"{tag}{text}>"
            whole = _ids(f"{question}{rule(text)};")
            ids[row, : len(whole)] = whole
            labels[row, len(question) : len(whole)] = whole[len(question) :]
        width = int((labels >= 0).nonzero()[1].max()) + 1
        return torch.from_numpy(ids[:, :width]), torch.from_numpy(labels[:, :width])

    def shown(self, tags: str, rows: int, random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (ids, labels) of questions that stand twice: with an answer to learn from, and with the same one to give.

        The answer is that of another rule, mostly, so that only who reads the first can give it.
        """
        ids, labels = np.zeros((rows, 2 * ROW), np.int64), np.full((rows, 2 * ROW), -100)
        for row, tag in enumerate(random.choice(list(tags), rows)):
            other = random.choice([each for each in tags if RULES[each][0] == RULES[tag][0]])
            text = self._draw(RULES[tag][0], random, held=False)
            question, answer = f"{tag}{text}>", f"{RULES[other][1](text)};"
            whole = _ids(2 * f"{question}{answer}")
            ids[row, : len(whole)] = whole
            labels[row, len(whole) - len(answer) : len(whole)] = whole[len(whole) - len(answer) :]
        width = int((labels >= 0).nonzero()[1].max()) + 1
        return torch.from_numpy(ids[:, :width]), torch.from_numpy(labels[:, :width])

    def _draw(self, kind: str, random: np.random.Generator, held: bool) -> str:
        if kind == "tag":
            return chr(ord("A") + random.integers(16))
        if kind == "word":
            return self._words[held][random.integers(len(self._words[held]))]
        if kind == "digits":
            while True:
                digits = "".join(map(str, random.integers(0, 10, random.integers(4, 8))))
                if (crc32(digits.encode()) % 8 == 0) is held:
                    return digits
        return self._phrases[held][random.integers(len(self._phrases[held]))]

    def batches(self, task: str, rows: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches of one task without end."""
        random = np.random.default_rng([seed, ord(task)])
        while True:
            yield self.rule(task, rows, random)


def _ids(text: str) -> np.ndarray:
    return np.fromiter((IDS[sign] for sign in text), np.int64, len(text))
