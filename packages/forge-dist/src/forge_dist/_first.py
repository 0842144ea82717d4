"""A function that one rank runs, maybe for hours → its value on all ranks, over a store."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from forge_dist._errors import WorkerError

if TYPE_CHECKING:
    import torch.distributed as dist

# A store's call that waits is asked again after this long, so that signals are handled in between.
_ASK_SECONDS = 1.0


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
    import torch.distributed as dist

    while True:
        try:
            store.wait([key], timedelta(seconds=_ASK_SECONDS))
        except dist.DistStoreError:
            continue
        return store.get(key)
