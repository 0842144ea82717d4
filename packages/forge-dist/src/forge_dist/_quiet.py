"""Transformers' own bars and notes off for a while, and DeepSpeed's for good: what they would say is checked here and raised as an error."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def hush_deepspeed() -> None:
    """Keep DeepSpeed, before it is imported, from writing notes to standard output, which is where a command's answer goes.

    Transformers, accelerate and peft import it wherever it is installed. Its import sets its log's level; a filter that is there first stays.
    """
    log = logging.getLogger("DeepSpeed")
    if _is_error not in log.filters:
        log.addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Silence transformers' log below ERROR and, unless `bars`, its progress bars; both are as before afterwards."""
    from transformers.utils import logging as transformers_log

    verbosity, had_bars = transformers_log.get_verbosity(), transformers_log.is_progress_bar_enabled()
    transformers_log.set_verbosity_error()
    if not bars:
        transformers_log.disable_progress_bar()
    try:
        yield
    finally:
        transformers_log.set_verbosity(verbosity)
        if had_bars and not bars:
            transformers_log.enable_progress_bar()
