"""Errors of this package, one family.

```
ForgeDataError                  exit_status 2: the input is at fault, and the message says what to do
├── DataError(ValueError)       a file or a row: missing, broken, of no known format, nothing left to train
│   └── BadPairError            a row of preferences that prefers nothing
├── TemplateError(ValueError)   a chat template that is missing, or leaves open which tokens the assistant wrote
├── TokenizerError(ValueError)  no tokenizer there, or one that lacks something needed
└── StoreError(ValueError)      a token store that is torn, of another program, or in the way
```

A message says what is wrong, where (`train.jsonl:417`, field), what was found and what to do. It names settings in backticks,
which the command line replaces by its flags. All errors pickle. What does not print is written as an escape, so that the name
of a file cannot control a terminal.
"""

from typing import ClassVar


def printable(text: str) -> str:
    r"""Escape characters that do not print, and so could control a terminal.

    >>> print(printable("a\x1b[31m\u202e.jsonl"))
    a\x1b[31m\u202e.jsonl
    """
    return text if text.isprintable() else "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


class ForgeDataError(Exception):
    """Base class of the family; `except ForgeDataError` catches every refusal of forge_data."""

    exit_status: ClassVar[int] = 2
    """Exit status of a command that this error ends."""
    of_a_row: bool = False
    """Whether it is one row's, which `on_bad_row=skip` would leave out."""

    def __str__(self) -> str:
        return printable(super().__str__())


class DataError(ForgeDataError, ValueError):
    """A file or a row that cannot become tokens."""


class BadPairError(DataError):
    """A row of preferences that prefers nothing: equal answers, two prompts, an empty answer."""

    def __init__(self, *args: object, reason: str = "") -> None:
        super().__init__(*args)
        self.reason = reason
        """Reason in the accounting: `same_answers`, `same_answers_within_max_seq_len`, `prompts_differ`, `empty_answer`."""


class TemplateError(ForgeDataError, ValueError):
    """A chat template that is missing, or that leaves open which tokens the assistant wrote."""


class TokenizerError(ForgeDataError, ValueError):
    """A tokenizer that cannot be loaded, or lacks something that is needed."""


class StoreError(ForgeDataError, ValueError):
    """A token store that cannot be written, or is not what it claims to be."""
