"""Silence log messages of transformers, DeepSpeed and bitsandbytes.

What they report is raised as an error by this package, or ruled out.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def quiet_imports() -> None:
    """Filter messages below ERROR that DeepSpeed and bitsandbytes log at import.

    DeepSpeed writes them to standard output, where a command's answer goes; bitsandbytes warns of a kernel that it would fetch
    from the hub, which `keep_as_loaded` keeps it from using. transformers, accelerate and peft import both wherever they are
    installed. DeepSpeed sets its logger's level; a filter that is there first stays.
    """
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        log = logging.getLogger(name)
        if _is_error not in log.filters:
            log.addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def quiet_transformers(*, bars: bool = False) -> Iterator[None]:
    """Silence transformers' log below ERROR and (unless `bars`) its progress bars."""
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


@contextmanager
def quiet_redistribution() -> Iterator[None]:
    """Keep torch from warning of each tensor that it gathers over two groups of ranks."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
