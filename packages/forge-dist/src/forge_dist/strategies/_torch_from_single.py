"""One process: nothing is divided."""

from contextlib import AbstractContextManager, nullcontext

from forge_dist.strategies._torch import Divided


class Single(Divided):
    """The strategy of a world of one, whatever was asked for by name."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  the protocol's
        return nullcontext()
