"""Transformers' own bars and notes off for a while: what they would say is checked here and raised as an error."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Silence transformers' log below ERROR and, unless `bars`, its progress bars; both are as before afterwards."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars and not bars:
            logging.enable_progress_bar()
