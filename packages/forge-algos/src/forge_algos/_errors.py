"""Exceptions of forge_algos, as a family.

ForgeAlgosError                       everything below; exit status 2
├── AdapterError(ValueError)          an adapter that does not fit its model
├── PackedBatchError(ValueError)      a packed row that is malformed, or that meets a KV cache or a 2-D mask
├── NoTargetsError(ValueError)        an evaluation in which no token is learned
├── LossError(ValueError)             a loss that was asked for with arguments that do not go together
├── OptimizerError(ValueError)        an optimizer or schedule that does not fit the model, the device or the run
├── MissingPackageError(ImportError)  an optional package that is not installed
├── ReferenceMismatchError(ValueError) reference log-probabilities that are not those of the model
├── UnevenRanksError(ValueError)      ranks that were not given equally many batches
├── RewardError(ValueError)           a reward function that is not there, raises, or gives what is no reward
├── RehearsalError(ValueError)        memory that cannot be computed without the values of weights
├── RolloutError(ValueError)          a rollout that cannot be made, or a file that holds none
└── DivergedError(FloatingPointError) a loss or a gradient norm that is no number; exit status 1

`exit_status` is the status of a command that ends so: 2 if the input was bad, 1 if the run failed.
"""

from typing import ClassVar


class ForgeAlgosError(Exception):
    """Base class of what forge_algos raises on purpose; its message is for who started the run."""

    exit_status: ClassVar[int] = 2


class AdapterError(ForgeAlgosError, ValueError):
    """Adapter that does not fit its model: a target matches nothing or cannot carry one."""


class PackedBatchError(ForgeAlgosError, ValueError):
    """Malformed packed row, or a forward that would let its documents see each other."""


class NoTargetsError(ForgeAlgosError, ValueError):
    """Batches in which nothing is learned, so that a mean over learned tokens does not exist."""


class LossError(ForgeAlgosError, ValueError):
    """Arguments of a loss that do not go together, are out of range, or are not read."""


class OptimizerError(ForgeAlgosError, ValueError):
    """Optimizer that does not fit the model or the device, or schedule that does not fit a run."""


class MissingPackageError(ForgeAlgosError, ImportError):
    """Optional package that a setting needs and that is not installed; the message installs it."""


class ReferenceMismatchError(ForgeAlgosError, ValueError):
    """Reference log-probabilities that are not those of the model that training starts from."""


class UnevenRanksError(ForgeAlgosError, ValueError):
    """Ranks without equally many batches, of which some would wait for others without end."""


class RewardError(ForgeAlgosError, ValueError):
    """Reward function that is missing, raised, or returned no reward.
    The message names the function, the row and the value.
    """


class RehearsalError(ForgeAlgosError, ValueError):
    """Training that cannot be rehearsed without data: a shape follows from values of weights."""


class RolloutError(ForgeAlgosError, ValueError):
    """Arguments from which no rollout can be made, or a file that does not hold a whole one."""


class DivergedError(ForgeAlgosError, FloatingPointError):
    """Loss or gradient norm that is NaN or infinite.
    It is raised before the optimizer moves, so the weights are intact.
    """

    exit_status: ClassVar[int] = 1
