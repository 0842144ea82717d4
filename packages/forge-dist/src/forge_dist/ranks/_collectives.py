"""Collectives over bytes and numbers. Nothing is pickled."""

import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def gather_bytes(data: bytes, group: "dist.ProcessGroup", device: "torch.device") -> list[bytes]:
    """Gather every rank's bytes, by rank, on every rank.

    Two collectives: the lengths, then the bytes, padded to the longest.
    """
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    counts = [int(length.item()) for length in lengths]
    longest = max(counts)
    if longest == 0:
        return [b""] * size
    parts = gather_padded(data.ljust(longest, b"\0"), size, group, device)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def gather_padded(data: bytes, size: int, group: "dist.ProcessGroup", device: "torch.device") -> list[bytes]:
    """Gather bytes that are equally long on all ranks, in one collective."""
    import torch
    import torch.distributed as dist

    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes() for part in parts]


def gather_rows(rows: "torch.Tensor", group: "dist.ProcessGroup", device: "torch.device") -> list["torch.Tensor"]:
    """Gather every rank's rows [n, ...], by rank, on every rank.

    They arrive to the bit, on the device of `rows`. Two collectives: the numbers of rows, then their bytes, padded to the most.
    """
    import torch
    import torch.distributed as dist

    size, shape = dist.get_world_size(group), rows.shape[1:]
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(rows)], dtype=torch.int64, device=device), group=group)
    numbers = [int(count.item()) for count in counts]
    # As bytes, which every backend carries, whatever the dtype.
    mine = torch.zeros(max(numbers), *shape, dtype=rows.dtype, device=device)
    if not mine.numel():
        return [rows.new_zeros(number, *shape) for number in numbers]
    mine[: len(rows)] = rows.detach()
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather([part.view(torch.uint8) for part in parts], mine.view(torch.uint8), group=group)
    return [part[:number].to(rows.device) for part, number in zip(parts, numbers, strict=True)]


def sum_numbers(values: Sequence[float], size: int, group: "dist.ProcessGroup", device: "torch.device") -> list[float]:
    """Sum float64 numbers over ranks, correctly rounded: the same bits on every rank.

    They depend neither on the order of the ranks nor on what the device can add.
    """
    packed = struct.pack(f"<{len(values)}d", *values)
    if not packed:
        return []
    rows = [struct.unpack(f"<{len(values)}d", part) for part in gather_padded(packed, size, group, device)]
    return [exact_sum(column) for column in zip(*rows, strict=True)]


def largest_number(number: int, group: "dist.ProcessGroup", device: "torch.device") -> int:
    """Return the largest number over ranks, int64."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found.item())


def exact_sum(column: Sequence[float]) -> float:
    """Return the correctly rounded sum; NaN and infinities propagate as in an ordinary sum.

    `math.fsum` raises an exception for those.
    """
    if all(map(math.isfinite, column)):
        return math.fsum(column)
    return sum(column)


def broadcast_bytes(data: bytes, group: "dist.ProcessGroup", device: "torch.device") -> bytes:
    """Return rank 0's bytes on every rank."""
    import torch
    import torch.distributed as dist

    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=0)
    if not int(length.item()):
        return b""
    content = bytearray(data) if dist.get_rank(group) == 0 else bytearray(int(length.item()))
    tensor = torch.frombuffer(content, dtype=torch.uint8).to(device)
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor.cpu().numpy().tobytes()


def collect_bytes(data: bytes, group: "dist.ProcessGroup", device: "torch.device") -> list[bytes] | None:
    """Gather every rank's bytes, by rank, on rank 0; None elsewhere.

    Two collectives: the longest length, then the bytes, padded to that.
    """
    import torch
    import torch.distributed as dist

    longest = largest_number(len(data), group, device)
    mine = _framed(data, longest).to(device)
    is_first = dist.get_rank(group) == 0
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))] if is_first else None
    dist.gather(mine, parts, group=group, group_dst=0)
    return None if parts is None else [_unframed(part) for part in parts]


def scatter_bytes(parts: Sequence[bytes] | None, group: "dist.ProcessGroup", device: "torch.device") -> bytes:
    """Return this rank's of rank 0's `parts`, which has one for each rank; None elsewhere."""
    import torch
    import torch.distributed as dist

    longest = largest_number(0 if parts is None else max(map(len, parts)), group, device)
    sent = None if parts is None else [_framed(part, longest).to(device) for part in parts]
    mine = torch.empty(_PREFIX + longest, dtype=torch.uint8, device=device)
    dist.scatter(mine, sent, group=group, group_src=0)
    return _unframed(mine)


_PREFIX = 8  # bytes of a length before padded bytes


def _framed(data: bytes, longest: int) -> "torch.Tensor":
    """Return the length and the bytes, padded."""
    import torch

    return torch.frombuffer(bytearray(struct.pack("<q", len(data)) + data.ljust(longest, b"\0")), dtype=torch.uint8)


def _unframed(part: "torch.Tensor") -> bytes:
    data = part.cpu().numpy().tobytes()
    return data[_PREFIX : _PREFIX + struct.unpack_from("<q", data)[0]]


_SHORT = 512  # bytes of JSON that are not worth compressing
_COMPRESSED = b"\x78"  # zlib's first byte, with which no JSON begins


def to_json(value: object) -> bytes:
    """Encode a value as JSON, a long one compressed.

    Raises TypeError or ValueError where that is impossible.
    """
    data = json.dumps(value).encode()
    return data if len(data) <= _SHORT else zlib.compress(data, 1)


def from_json(data: bytes) -> Any:
    """Decode what `to_json` encoded."""
    return json.loads(zlib.decompress(data) if data.startswith(_COMPRESSED) else data)
