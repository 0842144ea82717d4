"""forge's DPO with each pair's prompt in the row once for each completion, as one side of `shared_prompts.py`."""

from typing import Any

import _side_forge_dpo
from _rows import Rows


def run(job: dict[str, Any], rows: Rows, session: Any) -> None:
    """Train until the session ends it."""
    _side_forge_dpo.run({**job, "share": False}, rows, session)
