"""forge's SFT on conversations as one sample a conversation, in the form of history, a side of `shared_histories.py`."""

from typing import Any

import _side_turns
from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    _side_turns.run(job, rows, session, form="whole")
