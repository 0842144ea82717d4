"""A token store in memory, with any tokens, roles, findings and dropped rows, for tests of the viewer."""

from pathlib import Path

import numpy as np

from forge_data import Accounting, StoreError, TokenizedExample
from forge_data.findings._report import LintReport

SHA256 = {"input_ids.bin": "a1" * 32, "loss_mask.bin": "b2" * 32}
FINGERPRINT = "c3" * 32


def example(tokenizer, *parts):
    """Make an example of parts (role, text or ids, learned); neighbours of one role and mask are one segment."""
    ids, mask, starts, roles = [], [], [], []
    for role, text, learned in parts:
        own = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else list(text)
        if not roles or role != roles[-1]:
            starts.append(len(ids))
            roles.append(role)
        ids += own
        mask += [learned] * len(own)
    segments = np.array([*zip(starts, [*starts[1:], len(ids)], strict=True)], dtype=np.int32)
    return TokenizedExample.from_mask(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool), segments, tuple(roles))


def chat(tokenizer, *turns):
    """Make ChatML turns of (role, content); the assistant's content and turn end are learned."""
    parts = []
    for role, content in turns:
        learned = role == "assistant"
        parts += [(role, f"<|im_start|>{role}\n", False), (role, f"{content}<|im_end|>", learned), (role, "\n", False)]
    return example(tokenizer, *parts)


class Store:
    """What the viewer reads of a `TokenStore`, without a disk."""

    def __init__(
        self, examples, tokenizer=None, *, findings=(), dropped=(), kind="supervised", name="store", source="train.jsonl"
    ):
        self.examples, self._tokenizer, self._dropped, self.kind = examples, tokenizer, list(dropped), kind
        self.path = Path(name)
        self.lint = LintReport(findings, rows=len(examples) + len(self._dropped))
        reasons = {row["reason"]: 0 for row in self._dropped}
        for row in self._dropped:
            reasons[row["reason"]] += 1
        self.accounting = Accounting(len(examples) + len(self._dropped), len(examples), reasons)
        self.sha256, self.fingerprint = SHA256, FINGERPRINT
        self.held_out = frozenset()
        self._source = source
        self.verified = False

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]

    @property
    def lengths(self):
        return np.array([len(each) for each in self.examples])

    @property
    def loss_counts(self):
        return np.array([each.loss_count for each in self.examples])

    @property
    def media_counts(self):
        spans = [[image.stop - image.start for image in each.media] for each in self.examples]
        return np.array([[len(each), sum(each)] for each in spans]).reshape(-1, 2)

    @property
    def media_kinds(self):
        return tuple({medium.kind: None for each in self.examples for medium in each.media})

    @property
    def pairs(self):
        return np.arange(len(self)).reshape(-1, 2)

    @property
    def desirable(self):
        return np.arange(len(self)) % 2 == 0

    def source(self, index):
        return f"{self._source}:{index + 1}"

    def dropped(self):
        return iter([{"place": f"{row['file']}:{row['row']}"} | row for row in self._dropped])

    def tokenizer(self):
        if self._tokenizer is None:
            raise StoreError("it was made without one")
        return self._tokenizer

    def verify(self):
        self.verified = True
