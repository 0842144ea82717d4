"""float32 weights → bfloat16 weights, rounded at random so that the mean is exact.

A step of 1e-5 of a weight is less than half of bfloat16's spacing (2^-8): rounded to the nearest it would be lost, each time.
Rounded up with the probability that its place between the two neighbours says (arXiv 2010.06192), it arrives on average.

The random bits are a hash of a key and of an element's place in the whole tensor. So they are the same whether one rank moves
the tensor or each of several its rows, and on every device; a resumed run draws them again.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch

# Documented under this name: "Fake tensor" in torch's manual.
from torch._subclasses.fake_tensor import FakeTensor

from forge_algos._kernels import is_given_up, try_kernel

_KERNEL = "stochastic rounding"
_MASK = 0xFFFFFFFF
_FACTORS = (0x7FEB352D, 0x846CA68B)
"""Of lowbias32 (github.com/skeeto/hash-prospector), an integer hash without measurable bias."""


def rounding_key(seed: int, parameter: int, step: int) -> int:
    """Return the key, 32 bits, of a parameter's random bits in a step."""
    key = 0
    for number in (seed & _MASK, seed >> 32, parameter, step):
        key = _mixed(key ^ (number & _MASK))
    return key


def random_bits(rows: torch.Tensor, columns: torch.Tensor, key: int) -> torch.Tensor:
    """Draw 16 random bits for each element of a matrix, by its place.

    Args:
        rows: int32[M], numbers of rows of the whole matrix.
        columns: int32[D], numbers of columns.
        key: `rounding_key`.

    Returns:
        torch.Tensor: int32[M, D], 0 to 65,535.
    """
    return _random_bits(rows, columns, *keys_of_places(key))


def round_stochastically_(into: torch.Tensor, exact: torch.Tensor, *, first_row: int, key: int) -> None:
    """Write float32 numbers as bfloat16, by stochastic rounding.

    A number that bfloat16 has stays itself; infinities too, and NaN stays NaN.

    Args:
        into: bfloat16[M, D].
        exact: float32[M, D], contiguous; overwritten.
        first_row: number of its first row in the whole matrix.
        key: `rounding_key`.
    """
    kind = exact.device.type
    if isinstance(exact, FakeTensor) and (kind == "cpu" or is_given_up(_KERNEL, kind)):
        # Of a memory plan: what the operators allocate, and nothing that has data.
        rows, columns = (exact.new_empty(size, dtype=torch.int32) for size in exact.shape)
        _round_at(into, exact, rows, columns, *keys_of_places(key))
        return
    (_round_ if kind == "cpu" else _round_on_device)(into, exact, first_row, *keys_of_places(key))


def try_rounding(device: torch.device) -> None:
    """Find out whether a device rounds by one kernel: a memory plan follows, and cannot try."""
    if device.type != "cpu" and type(torch.empty(0, device=device)) is torch.Tensor:
        _rounding_on(device.type)


def keys_of_places(key: int) -> tuple[int, int]:
    """Return the keys of rows and of columns, as int32."""
    return _signed(key), _signed(_mixed(key))


def _random_bits(rows: torch.Tensor, columns: torch.Tensor, row_key: int, column_key: int) -> torch.Tensor:
    found = _mixed_(rows ^ row_key)[:, None] ^ _mixed_(columns ^ column_key)[None, :]
    found.mul_(_signed(_FACTORS[0]))
    found.bitwise_xor_((found >> 15).bitwise_and_(0x1FFFF))
    # The upper half of a product depends on all of its lower bits.
    return found.mul_(_signed(_FACTORS[1])).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _round_(into: torch.Tensor, exact: torch.Tensor, first_row: int, row_key: int, column_key: int) -> None:
    rows = torch.arange(first_row, first_row + exact.shape[0], dtype=torch.int32, device=exact.device)
    columns = torch.arange(exact.shape[1], dtype=torch.int32, device=exact.device)
    _round_at(into, exact, rows, columns, row_key, column_key)


def _round_at(
    into: torch.Tensor, exact: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, row_key: int, column_key: int
) -> None:
    """Round the numbers at int32[M] rows and int32[D] columns of a whole matrix."""
    # NaN has all bits set on a GPU: added to, it would be -0.
    nothing = exact.isnan()
    # A float is its sign and its magnitude: what is added to the digits that are cut off carries into those that stay.
    bits = exact.view(torch.int32).add_(_random_bits(rows, columns, row_key, column_key)).bitwise_and_(-0x10000)
    into.copy_(bits.view(torch.float32).masked_fill_(nothing, torch.nan))


@torch.library.custom_op("forge_algos::round_stochastically", mutates_args={"into", "exact"})
def _round_on_device(into: torch.Tensor, exact: torch.Tensor, first_row: int, row_key: int, column_key: int) -> None:
    _rounding_on(exact.device.type)(into, exact, first_row, row_key, column_key)


@_round_on_device.register_fake
def _(into: torch.Tensor, exact: torch.Tensor, first_row: int, row_key: int, column_key: int) -> None:
    # One kernel, which allocates nothing.
    del into, exact, first_row, row_key, column_key


def _rounding_on(kind: str) -> Callable[..., None]:
    """Return `_round_` as one kernel.

    Where that cannot be compiled, or has other bits, it stays a dozen passes over memory.
    """
    used = try_kernel(_KERNEL, kind, partial(_problem, kind), instead="operators")
    return _compiled(kind) if used else _round_


@lru_cache(maxsize=4)
def _compiled(_kind: str) -> Callable[..., None]:
    return torch.compile(_round_, dynamic=True)


def _problem(kind: str) -> str | None:
    for rows, columns, place in ((48, 512, (0, 2**31 - 1, -5)), (33, 300, (7, -(2**31), 3))):
        exact = torch.linspace(-3, 3, rows * columns, device=kind).view(rows, columns).sin_()
        found = [torch.empty_like(exact, dtype=torch.bfloat16) for _ in range(2)]
        for round_, into in zip((_round_, _compiled(kind)), found, strict=True):
            round_(into, exact.clone(), *place)
        if not torch.equal(*found):
            return "its bits are not those of the operators"
    return None


def _mixed(x: int) -> int:
    """Return lowbias32 of 32 bits."""
    for factor, shift in zip(_FACTORS, (16, 15), strict=True):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def _mixed_(x: torch.Tensor) -> torch.Tensor:
    """Return lowbias32 of int32[N], in place; its products overflow, as they must."""
    for factor, shift in zip(_FACTORS, (16, 15), strict=True):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(x: int) -> int:
    """Return the int32 of 32 bits."""
    return x - (1 << 32) if x >> 31 else x
