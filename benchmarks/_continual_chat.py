"""A chat model's continual learning: questions on the standard library's own sources, and what the model knew before.

Each task is one question on a line of real text, asked by the model's chat template: the instruction is the system's message,
the line the user's, the answer the assistant's. Lines are signatures and first sentences of docstrings, read out of the sources
that come with Python, without importing them. Answers stand in the line, so that all can be learned from some hundred rows,
and nothing but the instruction tells the tasks on signatures apart. The held-out fifth of the lines is never trained on,
under any instruction. General text is Python's language reference (`pydoc_data.topics`).
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import attrs
import numpy as np
import torch
from _continual_run import Batch, Subject

RULES: Mapping[str, tuple[str, str, Callable[[list[str]], str | None]]] = {
    "L": ("Name the last parameter.", "signature", lambda names: names[-1]),
    "S": ("Name the second parameter.", "signature", lambda names: names[1]),
    "W": ("Name the last word.", "sentence", lambda words: words[-1]),
}
"""Tag → instruction, kind of line, and the answer from the line's names or words."""
TEXT = 48
"""Tokens of a row of general text."""
TURNS = 16
"""Rows of a packed line, at most: attention to other rows is computed and masked, so that long lines cost more."""
PERIODS = re.compile(r"(?<=[a-z)])\.(?:\s|$)")


LEFT_OUT = {"__pycache__", "idlelib", "site-packages", "test", "tests"}
"""Folders whose sources are not read: their names and sentences repeat, or are not Python's."""


def sources(names: str = "**/*.py") -> list[Path]:
    """Return the files of the standard library that match, in order."""
    library = Path(ast.__file__).parent
    return [file for file in sorted(library.glob(names)) if LEFT_OUT.isdisjoint(file.relative_to(library).parts)]


def lines(files: Sequence[Path]) -> dict[str, dict[str, list[str]]]:
    """Read sources: kind → line → its names or words; the same for one Python version."""
    found: dict[str, dict[str, list[str]]] = {"signature": {}, "sentence": {}}
    for file in files:
        with warnings.catch_warnings():
            # Sources of the standard library hold escapes that newer versions warn of.
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                if arguments.args and arguments.args[0].arg in ("self", "cls"):
                    arguments.args.pop(0)
                names = [each.arg for each in arguments.args]
                # Of fewer than three names the second is the last; a star stands for names that are not there.
                if len(names) > 2 and not (
                    arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs
                ):
                    found["signature"][f"{node.name}({ast.unparse(arguments)})"] = names
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                sentence = PERIODS.split(" ".join(text.split("\n\n")[0].split()))[0]
                words = sentence.split(" ")
                if len(words) > 3 and all(re.fullmatch(r"[A-Za-z'-]+,?", word) for word in words):
                    found["sentence"][f"{sentence}."] = words
    return found


class Questions:
    """Rows of the tasks and of general text, in the tokens of a model."""

    def __init__(self, tokenizer: Any, *, files: Sequence[Path], longest: int) -> None:
        from pydoc_data.topics import topics

        from forge_data import tokenize

        kinds = lines(files)
        self._rows: dict[tuple[str, bool], list[tuple[list[int], list[int]]]] = {}
        for tag, (instruction, kind, answer) in RULES.items():
            for line, parts in kinds[kind].items():
                turns = {"system": instruction, "user": line, "assistant": answer(parts)}
                row = tokenize({"messages": [{"role": r, "content": c} for r, c in turns.items()]}, tokenizer)
                if len(row.input_ids) <= longest:
                    held = crc32(line.encode()) % 5 == 0
                    self._rows.setdefault((tag, held), []).append((list(row.input_ids), list(row.labels)))
        self._text = {
            held: np.concatenate(
                [
                    tokenizer(text)["input_ids"]
                    for name, text in sorted(topics.items())
                    if (crc32(name.encode()) % 5 == 0) is held
                ]
            )
            for held in (True, False)
        }

    def text(self, rows: int, random: np.random.Generator, *, held: bool = False) -> Batch:
        """Draw (ids, labels) [rows, TEXT]: windows of the language reference, all of it learned."""
        text = self._text[held]
        starts = random.integers(0, len(text) - TEXT, rows)
        ids = torch.from_numpy(text[starts[:, None] + np.arange(TEXT)])
        return ids, ids

    def rule(self, tags: str, rows: int, random: np.random.Generator, *, held: bool = False) -> Batch:
        """Draw (ids, labels) [rows, tokens of the longest], padded on the right; none twice where there are as many."""
        known = [row for tag in tags for row in self._rows[tag, held]]
        chosen = [known[k] for k in random.choice(len(known), rows, replace=rows > len(known))]
        width = max(len(ids) for ids, _ in chosen)
        ids = torch.zeros(rows, width, dtype=torch.long)
        labels = torch.full((rows, width), -100)
        for at, (row, learned) in enumerate(chosen):
            ids[at, : len(row)], labels[at, : len(row)] = torch.tensor(row), torch.tensor(learned)
        return ids, labels

    def batches(self, task: str, rows: int, seed: int) -> Iterator[Batch]:
        """Yield batches of one task without end."""
        random = np.random.default_rng([seed, ord(task)])
        while True:
            yield self.rule(task, rows, random)

    def counted(self) -> dict[str, list[int]]:
        """Return for each task how many rows are trained on and how many held out."""
        return {tag: [len(self._rows[tag, held]) for held in (False, True)] for tag in RULES}


@attrs.frozen(eq=False)
class Chat(Subject):
    """A pretrained chat model, in float32 with bfloat16 products."""

    directory: Path
    data: Questions
    rows: int = 8
    measured: int = 96
    kept: int = 64
    tasks: str = "".join(RULES)
    fused: bool | None = True

    def new(self) -> Any:
        """Load the model."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    def autocast(self) -> Any:
        """Compute products in bfloat16."""
        return torch.autocast("cpu", torch.bfloat16)

    def scored(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (logits [K, V], targets [K], row of each [K]) of a batch's K learned tokens; rows are packed into lines."""
        found = [self._packed(model, *(each[at : at + TURNS] for each in batch), at) for at in range(0, len(batch[0]), TURNS)]
        logits, targets, rows = zip(*found, strict=True)
        return torch.cat(logits), torch.cat(targets), torch.cat(rows)

    def _packed(
        self, model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ends = labels.shape[1] - (labels != -100).flip(1).int().argmax(1)
        places = torch.arange(ids.shape[1])
        filled = places < ends[:, None]
        wanted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)[filled]
        learned = (wanted != -100).nonzero()[:, 0]
        position_ids = places.expand_as(ids)[filled]
        with self.autocast():
            # transformers keeps the rows of a line apart where positions begin anew and there is no mask.
            output = model(ids[filled][None], position_ids=position_ids[None], use_cache=False, logits_to_keep=learned)
        rows = filled.nonzero()[:, 0][learned] + first
        return output.logits[0].float(), wanted[learned], rows

    def general(self, random: np.random.Generator) -> list[Batch]:
        """Draw rows of general text."""
        return [self.data.text(self.kept, random)]

    def left(self, model: torch.nn.Module) -> dict[str, float]:
        """Measure what is left: the loss of held-out general text, and the share of its tokens that are the likeliest."""
        text = self.data.text(self.measured // 2, np.random.default_rng(1), held=True)
        with torch.no_grad():
            logits, targets, _ = self.scored(model, text)
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return {"text_loss": float(loss), "skills": float((logits.argmax(-1) == targets).float().mean())}
