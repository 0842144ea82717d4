"""forge's SFT on conversations with the history repeated for each turn, a side of `shared_histories.py`."""

from typing import Any

import _side_turns
from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    _side_turns.run(job, rows, session, form="repeated")
