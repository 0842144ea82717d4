"""The heap: always the smallest key, of equal ones the smaller number."""

from hypothesis import given, strategies as st

from forge_packing.dividing.kernels._heap import descending, pop, push, sift_down

keys_of_numbers = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


@given(keys_of_numbers)
def test_push_and_pop(keys):
    """Numbers come out by key, equal keys by number, whatever order they went in."""
    heap, size = [0] * len(keys), 0
    for number in reversed(range(len(keys))):
        size = push(heap, size, keys, number)
    out = []
    while size:
        out.append(heap[0])
        size = pop(heap, size, keys)
    assert out == sorted(range(len(keys)), key=lambda number: (keys[number], number))


@given(keys_of_numbers, st.lists(st.integers(0, 9), max_size=30))
def test_sift_down(keys, additions):
    """After the first number's key has grown, the first is the smallest again."""
    heap, size = [0] * len(keys), 0
    for number in range(len(keys)):
        size = push(heap, size, keys, number)
    for addition in additions:
        keys[heap[0]] += addition
        sift_down(heap, size, keys)
        assert heap[0] == min(range(len(keys)), key=lambda number: (keys[number], number))
        assert sorted(heap) == list(range(len(keys)))


@given(keys_of_numbers)
def test_descending(values):
    """Largest first; of equal values the smaller number first."""
    assert descending(values, len(values)) == sorted(range(len(values)), key=lambda number: (-values[number], number))
