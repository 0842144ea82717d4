"""Transformers' own bars and notes off for a while, and DeepSpeed's for good: what they would say is checked here and raised as an error."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def hush_imports() -> None:
    """Keep DeepSpeed, before it is imported, from writing notes to standard output, which is where a command's answer goes, and bitsandbytes from
    warning of a kernel that it would fetch from the hub, and that `settle_quantized` keeps it from using.

    Transformers, accelerate and peft import them wherever they are installed. DeepSpeed sets its log's level; a filter that is there first stays.
    """
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        log = logging.getLogger(name)
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
