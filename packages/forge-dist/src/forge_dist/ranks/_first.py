"""A function that one rank runs, maybe for hours → its value on all ranks, over a store."""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forge_dist._errors import WorkerError

if TYPE_CHECKING:
    import torch.distributed as dist

# Asking is cheap, and a store's own way of waiting warns on the terminal each time that it was in vain.
_ASK_SECONDS = 0.1


def first(store: "dist.Store", key: str, function: Callable[[], Any], *, rank: int, host: str) -> Any:
    """Rank 0 calls `function` and puts its value (JSON) under `key`; the others wait for it as long as rank 0 lives.

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
        time.sleep(_ASK_SECONDS)
    return store.get(key)
