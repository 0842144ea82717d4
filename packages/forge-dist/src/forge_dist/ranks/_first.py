"""Functions that rank 0 runs, perhaps for hours, for all ranks, over a store."""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forge_dist._errors import WorkerError

if TYPE_CHECKING:
    import torch.distributed as dist

# Polling is cheap, and a store's own wait warns on the terminal each time that it ran out.
_POLL_SECONDS = 0.1


def run_on_first(store: "dist.Store", key: str, function: Callable[[], Any], *, rank: int, host: str) -> Any:
    """Call `function` on rank 0 and return its value (JSON) on every rank.

    The value travels under `key`; the other ranks wait for it as long as rank 0 lives.

    Raises:
        WorkerError: on the other ranks, when the function raised on rank 0.
    """
    if rank == 0:
        try:
            text = json.dumps({"value": function()})
        except BaseException as error:
            store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}", "host": host}))
            raise
        store.set(key, text)
        return json.loads(text)["value"]
    answer = json.loads(_wait(store, key))
    if "error" in answer:
        raise WorkerError(f"rank 0 on {answer['host']} ended: {answer['error']}")
    return answer["value"]


def _wait(store: "dist.Store", key: str) -> bytes:
    while not store.check([key]):
        time.sleep(_POLL_SECONDS)
    return store.get(key)
