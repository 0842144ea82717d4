"""Operations of transformers that are changed while a model is read in shards."""

import threading

from transformers.core_model_loading import Concatenate

from forge_dist.strategies.fsdp._misplaced import placeholders


def test_threads_that_load_at_once_leave_transformers_as_it_was():
    """The second one waits for the first; after both each operation is transformers' own."""
    own, ready, entered, leave = Concatenate.convert, *(threading.Event() for _ in range(3))

    def first():
        with placeholders():
            ready.set()
            entered.wait(0.2)  # in vain: the other one is kept out

    def second():
        ready.wait(10)
        with placeholders():
            entered.set()
            leave.wait(10)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    threads[0].join(10)
    assert entered.wait(10)
    assert Concatenate.convert is not own
    leave.set()
    threads[1].join(10)
    assert Concatenate.convert is own
