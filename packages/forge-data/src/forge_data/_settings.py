"""Settings of this room: which rows are trained on, and which are kept aside to measure by."""

from typing import Any

import attrs
from attrs import validators


def _whole(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{attribute.name} must be a whole number, got {value!r}")


def _number(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{attribute.name} must be a number, got {value!r}")


def _share(_: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    # Written so that NaN, which compares false with everything, is refused too.
    if not 0 <= value < 1:
        raise ValueError(f"{attribute.name} must be at least 0 and less than 1, got {value!r}")


_PATH = [validators.instance_of(str), validators.min_len(1)]


@attrs.frozen(kw_only=True)
class DataSettings:
    """Which rows are trained on, and which are kept aside to measure by."""

    data_path: str = attrs.field(validator=_PATH)
    """JSONL or Parquet file of training rows: messages, prompt and completion, or input_ids and labels."""

    eval_data_path: str | None = attrs.field(default=None, validator=validators.optional(_PATH))
    """File of held-out rows, in any shape that data_path may have. Not together with validation_split."""

    validation_split: float = attrs.field(default=0.0, validator=[_number, _share])
    """Share of the kept rows that is held out and never trained on, at least 0 and less than 1."""

    max_seq_len: int | None = attrs.field(default=None, validator=validators.optional([_whole, validators.ge(1)]))
    """Longest sample in tokens. Longer ones are dropped and counted, never truncated. No limit by default."""

    def __attrs_post_init__(self) -> None:
        if self.eval_data_path is not None and self.validation_split:
            raise ValueError(
                f"eval_data_path ({self.eval_data_path!r}) and validation_split ({self.validation_split!r}) both name the "
                "held-out rows: give one of them"
            )
