"""Claim: at 512 ranks of a 70B a save is planned in 2 s and 50 MB on any rank, and the store gets 200 requests a second.

Nothing is trained, and no tensor is made. The planning is the package's own, run for one rank after the other on what a rank of
a Llama 3.1 70B under fsdp2 (and hsdp over 8 ranks) would hold; what a rank sends and receives is counted where it would pass
between processes. The network's own time is not in it. For the store each rank is a thread in one of a few processes: it joins
the others, waits 2 seconds for rank 0 (`Ranks.first`), beats for a while, and leaves; every call of the run's store is counted,
and apart from it those of the stores within nodes.
`gathered_on_every_rank_bytes` is what each rank received when the pieces of all were gathered everywhere, as JSON.

    python benchmarks/dist_scale.py                    # 8, 64, 512 and 1,024 ranks
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar

from _llama_70b import LAYERS, pieces
from _report import emit, machine, note

from forge_dist.checkpoints._coordinate import SharedPlan, digest_of
from forge_dist.checkpoints._manifest import Manifest, versions
from forge_dist.checkpoints._write import WrittenFile, file_of
from forge_dist.ranks._collectives import from_json, to_json

SECONDS, MEGABYTES, REQUESTS = 2.0, 50.0, 200.0  # the aims
WAIT, PROCESSES = 2.0, 4  # seconds of `Ranks.first`, processes that hold the ranks of the store


class WaitingError(Exception):
    """End of a simulated rank's first pass."""


class Wire:
    """The ranks of a simulation: one at a time, and what passes between them is kept as bytes."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.rank = world_size, 0
        self.catalog = b""
        self.descriptions: dict[int, bytes] = {}
        self.answers: list[bytes] = []

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: object) -> Any:
        if self.is_first:
            self.catalog = to_json(value)
        return from_json(self.catalog)

    def collect(self, value: object) -> list[Any] | None:
        self.descriptions[self.rank] = to_json(value)
        if not self.is_first:
            return None
        if len(self.descriptions) < self.world_size:
            raise WaitingError  # the others have not come yet
        return [from_json(self.descriptions[rank]) for rank in range(self.world_size)]

    def scatter(self, values: list[object] | None) -> Any:
        if values is not None:
            self.answers = [to_json(value) for value in values]
        if not self.answers:
            raise WaitingError
        return from_json(self.answers[self.rank])


def plan(world_size: int, copies: int, layers: int) -> dict[str, Any]:
    """Plan a save: seconds, peaks and bytes of rank 0 and of the worst of some other ranks."""
    wire, plans = Wire(world_size), {}
    parts = world_size // copies  # ranks that hold the same part describe it in the same words

    def turn(rank: int, *, traced: bool = False) -> dict[str, float]:
        """Let a rank go on until it waits for another; return what that took."""
        wire.rank = rank
        held = pieces(rank, world_size, copies, layers)
        if traced:
            tracemalloc.start()
        began, working = time.perf_counter(), time.process_time()
        digest_of(held)
        plans[rank] = SharedPlan(wire)  # pyrefly: ignore[bad-argument-type]  as much of Ranks as it needs
        with suppress(WaitingError):
            plans[rank].make(held, [])
        took: dict[str, float] = {
            "seconds": round(time.perf_counter() - began, 3),
            "processor_seconds": round(time.process_time() - working, 3),
        }
        if traced:
            took = {"peak_bytes": tracemalloc.get_traced_memory()[1]}
            tracemalloc.stop()
        return took

    turn(0)  # its names
    for rank in range(1, world_size):
        if rank < parts:
            turn(rank)
        else:
            wire.descriptions[rank] = wire.descriptions[rank % parts]
    found: dict[str, Any] = {"rank_0": turn(0)}  # the plan
    # Some of the others go through it with what they receive.
    each = [turn(rank) for rank in (1, world_size // 2, world_size - 1)]
    found["others"] = {key: max(took[key] for took in each) for key in each[0]}
    # Again with its memory traced, which takes time.
    found["rank_0"] |= turn(0, traced=True)
    found["others"]["peak_bytes"] = max(turn(rank, traced=True)["peak_bytes"] for rank in (1, world_size - 1))
    longest, answer = max(map(len, wire.descriptions.values())), max(map(len, wire.answers))
    found["rank_0"] |= {"sends_bytes": world_size * answer + len(wire.catalog), "receives_bytes": world_size * longest}
    found["others"] |= {"sends_bytes": longest, "receives_bytes": answer + len(wire.catalog)}
    began = time.process_time()
    text = manifest(world_size, plans[0]).to_text()
    found["manifest"] = {"bytes": len(text), "processor_seconds": round(time.process_time() - began, 3)}
    # Each save after the first: a digest to rank 0, and its answer.
    found["unchanged"] = {"sends_bytes": len(to_json({"step": 1000, "invalid": None, "pieces": "0" * 64}))}
    sizes = [len(json.dumps(pieces(rank, world_size, copies, layers))) for rank in (0, world_size - 1)]
    found["gathered_on_every_rank_bytes"] = world_size * sum(sizes) // 2
    return found


def manifest(world_size: int, shared: SharedPlan) -> Manifest:
    """Return the manifest of such a save."""
    files = {file_of(rank): WrittenFile(10**9, "0" * 64) for rank in range(world_size)}
    return Manifest(
        step=1,
        serial=1,
        world_size=world_size,
        versions=versions(),
        must_match={},
        about={},
        files=files,
        tensors=shared.tensors,
    )


def store(world_size: int, seconds: float) -> dict[str, Any]:
    """Let ranks meet, wait for rank 0, beat for some seconds and leave; return what the store was asked, by phase."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    count = min(PROCESSES, world_size)
    began = time.perf_counter()
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--ranks-of", str(index), str(count), str(world_size), str(server.port), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "FORGE_HEARTBEAT_LIMIT": "600", "OMP_NUM_THREADS": "1"},
        )
        for index in range(count)
    ]
    try:
        printed = [json.loads(process.communicate(timeout=1200)[0].strip().splitlines()[-1]) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 2)}
    for phase in ("meet", "first", "beat", "leave"):
        lasted = max(each[phase]["seconds"] for each in printed)
        requests, size = (sum(each[phase][key] for each in printed) for key in ("requests", "bytes"))
        found[phase] = {
            "seconds": round(lasted, 2),
            "requests": requests,
            "requests_per_second": round(requests / lasted, 1),
            "requests_per_second_and_rank": round(requests / lasted / world_size, 3),
            "bytes_per_second": round(size / lasted),
            "requests_within_nodes": sum(each[phase]["within_nodes"] for each in printed),
        }
    return found


class Counted:
    """A store, each of whose calls is counted: of the run's by size too, of one within a node alone."""

    calls: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()
    port: ClassVar[int] = 0
    """Of the run's store."""

    def __init__(self, *arguments: Any) -> None:
        self._store = arguments[-1]
        self._prefix = "/".join(map(str, arguments[:-1]))
        self._within = getattr(arguments[-1].underlying_store, "port", Counted.port) != Counted.port

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            size = sum(len(str(each)) for each in arguments)
            with Counted.lock:
                if self._within:
                    Counted.calls["within_nodes"] += 1
                else:
                    Counted.calls["requests"] += 1
                    Counted.calls["bytes"] += size
            return found(*arguments, **named)

        return call


def hold(index: int, count: int, world_size: int, port: int, seconds: float) -> None:
    """Be the ranks index, index + count, ... as threads; print what each phase asked of the store."""
    import torch.distributed as dist

    import forge_dist

    real, Counted.port = dist.PrefixStore, port
    dist.PrefixStore = lambda prefix, store: Counted(prefix, real(prefix, store))  # pyrefly: ignore[bad-assignment]
    own = range(index, world_size, count)
    gates = {phase: threading.Barrier(len(own) + 1) for phase in ("met", "first", "beaten")}
    left: list[int] = []

    def be(rank: int) -> None:
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 8),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(min(8, world_size)),
            "GROUP_RANK": str(rank // 8),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        # A thousand threads on one machine take minutes to meet, longer than ranks of a run wait for each other.
        with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(connect_seconds=1800), environ=environ)) as ranks:
            gates["met"].wait()
            ranks.first(lambda: time.sleep(WAIT))
            gates["first"].wait()
            gates["beaten"].wait()
            if rank == 0:
                time.sleep(WAIT)  # as long as it writes after the others
        left.append(rank)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in own]
    found, began = {}, time.perf_counter()
    for thread in threads:
        thread.start()

    def phase(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        with Counted.lock:
            found[name] = {"seconds": now - began, **{key: Counted.calls[key] for key in ("requests", "bytes", "within_nodes")}}
            Counted.calls.clear()
        began = now

    gates["met"].wait()
    phase("meet")
    gates["first"].wait()
    phase("first")
    time.sleep(seconds)
    phase("beat")
    gates["beaten"].wait()
    for thread in threads:
        thread.join()
    phase("leave")
    assert len(left) == len(own)
    print(json.dumps(found), flush=True)
    os._exit(0)  # a thousand connections need not be taken down one by one


def main() -> None:
    """Simulate, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--seconds", type=float, default=10.0, help="of heartbeats")
    parser.add_argument("--toy", action="store_true", help="few ranks and layers: seconds, and no proof")
    parser.add_argument("--ranks-of", nargs=5, help="arguments of a process of ranks, set by this script")
    options = parser.parse_args()
    if options.ranks_of:
        index, count, world_size, port = map(int, options.ranks_of[:4])
        hold(index, count, world_size, port, float(options.ranks_of[4]))
    at = machine()
    sizes, layers, seconds = ([8, 16], 2, 1.0) if options.toy else (options.ranks, LAYERS, options.seconds)
    plans: dict[str, Any] = {}
    stores: dict[str, Any] = {}
    for world_size in sizes:
        for strategy, copies in (("fsdp2", 1), ("hsdp", max(1, world_size // 8))):
            found = plan(world_size, copies, layers)
            plans[f"{strategy}x{world_size}"] = found
            note(f"{strategy} on {world_size}: {found['rank_0']}, {found['others']}, manifest {found['manifest']}")
        stores[str(world_size)] = store(world_size, seconds)
        note(f"store of {world_size}: {stores[str(world_size)]}")
    judged = 512 if 512 in sizes else max(sizes)
    worst = [plans[f"{strategy}x{judged}"][who] for strategy in ("fsdp2", "hsdp") for who in ("rank_0", "others")]
    ratios = {
        # The processor's time: on a busy machine other processes take their turns within the seconds.
        "plan_seconds": SECONDS / max(each["processor_seconds"] for each in worst),
        "plan_bytes": MEGABYTES * 2**20 / max(each["peak_bytes"] for each in worst),
        "store_requests": REQUESTS
        / max(stores[str(judged)][phase]["requests_per_second"] for phase in ("first", "beat", "leave")),
    }
    emit(
        "dist_scale",
        f"a save of a 70B on {judged} ranks is planned within 2 s and 50 MB a rank, and the store gets 200 requests a second",
        min(ratios.values()),
        1.0,
        toy=options.toy,
        at=at,
        ratios={name: round(ratio, 3) for name, ratio in ratios.items()},
        plans=plans,
        stores=stores,
        sizes={"layers": layers, "ranks": sizes, "processes": PROCESSES, "heartbeat_seconds": seconds, "first_seconds": WAIT},
    )


if __name__ == "__main__":
    main()
