"""What can go wrong in this room, as a family.

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
├── RolloutError(ValueError)          a rollout that cannot be made, or a file that holds none
└── DivergedError(FloatingPointError) a loss or a gradient norm that is no number; exit status 1

`exit_status` is read by shape by whoever runs a command: 2 says that the input was bad, 1 that the run failed.
"""

from typing import ClassVar


class ForgeAlgosError(Exception):
    """The root of what forge_algos raises on purpose; its message is written for the person who started the run."""

    exit_status: ClassVar[int] = 2


class AdapterError(ForgeAlgosError, ValueError):
    """An adapter does not fit its model: a target that matches nothing, or a layer that cannot carry one."""


class PackedBatchError(ForgeAlgosError, ValueError):
    """A packed row is malformed, or a forward would let its documents see each other."""


class NoTargetsError(ForgeAlgosError, ValueError):
    """Nothing in the batches is learned, so a mean over learned tokens does not exist."""


class LossError(ForgeAlgosError, ValueError):
    """A loss was asked for with arguments that do not go together: shapes, names, numbers out of range, or what nothing reads."""


class OptimizerError(ForgeAlgosError, ValueError):
    """An optimizer does not fit the model or the device, or a schedule does not fit the run."""


class MissingPackageError(ForgeAlgosError, ImportError):
    """A setting needs an optional package that is not installed; the message has the command that installs it."""


class ReferenceMismatchError(ForgeAlgosError, ValueError):
    """The reference's log-probabilities are not those of the model that training starts from, so the first loss is not its start."""


class UnevenRanksError(ForgeAlgosError, ValueError):
    """The ranks were not given equally many batches, so that some would wait for the others for ever."""


class RewardError(ForgeAlgosError, ValueError):
    """A reward function is not there, raised, or gave what is no reward; the message names function, row and what came."""


class RolloutError(ForgeAlgosError, ValueError):
    """A rollout cannot be made from what was given, or a file does not hold one that is whole."""


class DivergedError(ForgeAlgosError, FloatingPointError):
    """The loss or the gradient norm is NaN or infinite; raised before the optimizer moves, so the weights are still good."""

    exit_status: ClassVar[int] = 1
