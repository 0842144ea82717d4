"""Binary heap of the numbers 0, 1, 2, ..., ordered by keys[number], ties by the number.

Like every kernel, these functions are run by Python, on lists, and by numba, on int64 arrays (`_compile.py`). So they index,
compare and add integers, and nothing else.
"""

from typing import Any

Ints = Any
"""list[int] in Python, int64[n] in numba."""


def zeros(size: int) -> Ints:
    """Return `size` zeros. Compiled, this is np.zeros."""
    return [0] * size


def sift_down(heap: Ints, size: int, keys: Ints) -> None:
    """Restore the heap order after the key of the first entry has grown."""
    item = heap[0]
    key = keys[item]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size:
            a, b = heap[right], heap[child]
            if keys[a] < keys[b] or (keys[a] == keys[b] and a < b):
                child = right
        other = heap[child]
        if key < keys[other] or (key == keys[other] and item < other):
            break
        heap[at] = other
        at = child
    heap[at] = item


def push(heap: Ints, size: int, keys: Ints, item: int) -> int:
    """Push a number; return the new size."""
    at = size
    key = keys[item]
    while at > 0:
        parent = (at - 1) // 2
        other = heap[parent]
        if keys[other] < key or (keys[other] == key and other < item):
            break
        heap[at] = other
        at = parent
    heap[at] = item
    return size + 1


def pop(heap: Ints, size: int, keys: Ints) -> int:
    """Remove the first number; return the new size."""
    size -= 1
    heap[0] = heap[size]
    if size > 1:
        sift_down(heap, size, keys)
    return size


def descending(values: Ints, size: int) -> Ints:
    """Sort the numbers 0 to size - 1 by descending value, ties by the number."""
    keys = zeros(size)
    heap = zeros(size)
    held = 0
    for number in range(size):
        keys[number] = -values[number]
        held = push(heap, held, keys, number)
    order = zeros(size)
    for at in range(size):
        order[at] = heap[0]
        held = pop(heap, held, keys)
    return order
