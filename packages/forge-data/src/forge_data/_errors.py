"""What goes wrong in this room, one family.

```
ForgeDataError                  exit_status 2: the input is at fault, and the message says how to mend it
├── DataError(ValueError)       a file or a row: missing, broken, of no known shape, nothing left to train
│   └── BadPairError            a row of preferences that prefers nothing
├── TemplateError(ValueError)   a chat template that is absent, or whose assistant turns cannot be told apart
├── TokenizerError(ValueError)  no tokenizer there, or one that cannot do what is asked
└── StoreError(ValueError)      a token store that is torn, foreign or in the way
```

A message says what is wrong, where (`train.jsonl:417`, field), what was found and what to do. All of them pickle.
"""

from typing import ClassVar


class ForgeDataError(Exception):
    """Root of the family; `except ForgeDataError` catches whatever forge_data refuses."""

    exit_status: ClassVar[int] = 2
    """What a command exits with when this ends it."""


class DataError(ForgeDataError, ValueError):
    """A file or a row that cannot become tokens."""


class BadPairError(DataError):
    """A row of preferences that prefers nothing: equal answers, two prompts, an empty answer."""

    def __init__(self, *args: object, reason: str = "") -> None:
        super().__init__(*args)
        self.reason = reason
        """What the accounting calls it: `same_answers`, `same_answers_within_max_seq_len`, `prompts_differ`, `empty_answer`."""


class TemplateError(ForgeDataError, ValueError):
    """A chat template that is absent, or that leaves open which tokens the assistant wrote."""


class TokenizerError(ForgeDataError, ValueError):
    """A tokenizer that cannot be loaded or lacks something that is needed."""


class StoreError(ForgeDataError, ValueError):
    """A token store that cannot be written or is not what it says."""
