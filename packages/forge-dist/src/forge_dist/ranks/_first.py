"""Functions that rank 0 runs, perhaps for hours, for all ranks, over a store."""

import json
from collections.abc import Callable
from typing import Any

from forge_dist._errors import WorkerError
from forge_dist.ranks._failure_report import failure_report
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._relay import Relay


def run_on_first(
    store: Messages | Relay,
    key: str,
    function: Callable[[], Any],
    *,
    rank: int,
    host: str,
    explain: Callable[[BaseException], BaseException] = lambda error: error,
) -> Any:
    """Call `function` on rank 0 and return its value (JSON) on every rank.

    The value travels under `key`; the other ranks wait for it as long as rank 0 lives. They are told an error as `explain` has
    it.

    Raises:
        WorkerError: on the other ranks, when the function raised on rank 0; its `cause` is the report of that failure, for rank
            0 may be ended before it wrote its own.
    """
    if rank == 0:
        try:
            text = json.dumps({"value": function()})
        except BaseException as error:
            store.set(key, json.dumps({"error": failure_report(explain(error), rank=rank, host=host)}))
            raise
        store.set(key, text)
        return json.loads(text)["value"]
    answer = json.loads(store.receive(key))
    if "error" in answer:
        report = answer["error"]
        error = WorkerError(f"rank 0 on {report['host']} ended: {report['class']}: {report['text']}")
        error.cause = report
        raise error
    return answer["value"]
