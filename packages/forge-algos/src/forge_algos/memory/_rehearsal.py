"""Training step, or an evaluation, of a model without data → the worst moment of its memory."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import RehearsalError
from forge_algos._modules import head, trainable
from forge_algos.adaptations.base._adaptation import Adaptation
from forge_algos.memory._fake import fake_mode, without_data
from forge_algos.memory._findings import adopt_findings, pass_for_probed
from forge_algos.memory._tracker import Peak, Tracker
from forge_algos.objectives import Objective
from forge_algos.optimizers._schedules import schedule
from forge_algos.settings._moe import MoEAuxLoss
from forge_algos.settings._optimizer import OptimizerSettings
from forge_algos.training._evaluate import evaluate
from forge_algos.training._train import train


@attrs.frozen(kw_only=True)
class Rehearsal:
    """Training without numbers: `train` and `evaluate` on tensors that hold no data.

    The calls are those of a run: `model` in the place of loading one, `adapt` within `adapting`, then `placed`, an optimizer,
    and `step` and `evaluation`. All of it is computed in shapes; nothing as large as the model is allocated.

    A value that depends on weights is not there. Where one is needed (an `if` on a loss) it is taken as 1, and said so in the
    peak's `guesses`; where a shape would follow from it (which tokens an expert gets), it is an error.
    """

    device: torch.device
    """Device whose kernels are meant."""
    allocated: Callable[[int], int] = int
    """Bytes of a tensor → bytes that its allocator takes for them."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context of the forwards."""
    _mode: Any = attrs.field(factory=fake_mode, init=False)

    def model(self, outline: nn.Module, draft: nn.Module | None, *, packed: bool = True) -> nn.Module:
        """Let an outline on the meta device pass for a loaded and probed model; returns it.

        Args:
            outline: on the meta device, as large as the model.
            draft: small random model of the same configuration, through `keep_documents_apart`, or None.
            packed: without a draft, whether documents share a row.
        """
        with _explained(), torch.random.fork_rng(devices=[]):
            adopt_findings(outline, draft, device=self.device, packing="on" if packed else "off")
        return outline

    @contextmanager
    def adapting(self) -> Iterator[None]:
        """Enclose what puts weights beside those of an outline: `adapt`, a value head.

        Raises:
            RehearsalError: it needs values.
        """
        with _explained(), torch.random.fork_rng(devices=[]), Tracker():
            yield

    def placed(self, model: nn.Module) -> nn.Module:
        """Put an adapted outline on the device, without data, for an optimizer to be made."""
        without_data(model, self._mode, self.device)
        pass_for_probed(model, device=self.device)
        return model

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: Sequence[Any],
        *,
        objective: Callable[[], Objective],
        adaptation: Adaptation | None = None,
        others: Iterable[nn.Module] = (),
        first: bool = False,
        buckets: bool = False,
        max_grad_norm: float = 1.0,
        moe_aux_loss: MoEAuxLoss = "global",
        keep_casts: bool = False,
    ) -> Peak:
        """Take a step on `micro_batches`, as `train` does.

        Args:
            model: as `placed` returned it, perhaps wrapped.
            optimizer: over its parameters.
            micro_batches: of one rank.
            objective: makes what is learned.
            adaptation: what `adapt` returned.
            others: further models that stay on the device.
            first: whether the optimizer has no state yet, as before a run's first step.
            buckets: whether gradients lie in buffers that stay from step to step, as those of DistributedDataParallel.
            max_grad_norm: as of `train`.
            moe_aux_loss: as of `train`.
            keep_casts: as of `train`.

        Raises:
            RehearsalError: it needs values.
        """
        with _explained(), ExitStack() as stack:
            tracker = Tracker(self.allocated)
            self._hold(tracker, model, optimizer, others)
            stack.enter_context(_counted(tracker, model, optimizer))
            with torch.random.fork_rng(devices=[]), tracker:
                if not first and not optimizer.state:
                    _make_state(model, optimizer)
                began = tracker.position
                for _ in train(
                    model,
                    [micro_batches],
                    objective=objective(),
                    optimizer=optimizer,
                    scheduler=schedule(optimizer, OptimizerSettings(), num_steps=4),
                    max_grad_norm=max_grad_norm,
                    device=self.device,
                    autocast=self.autocast,
                    adaptation=adaptation,
                    on_nan="skip",
                    moe_aux_loss=moe_aux_loss,
                    keep_casts=keep_casts,
                ):
                    pass
            for parameter in model.parameters():
                parameter.grad = None
            held = sum(self.allocated(p.numel() * p.element_size()) for p in trainable(model))
            return tracker.peak(began, always={"gradients": held} if buckets else None)

    def evaluation(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        objective: Callable[[], Objective],
        others: Iterable[nn.Module] = (),
    ) -> Peak:
        """Measure the loss of a batch, as `evaluate` does; arguments and errors as of `step`.

        The gradients of the step before are still there.
        """
        with _explained(), ExitStack() as stack:
            tracker = Tracker(self.allocated)
            self._hold(tracker, model, optimizer, others)
            stack.enter_context(_counted(tracker, model, optimizer))
            with torch.random.fork_rng(devices=[]), tracker:
                with tracker.counting("gradients"):
                    held = [torch.empty_like(p) for p in trainable(model)]
                began = tracker.position
                evaluate(model, [batch], objective=objective(), device=self.device, autocast=self.autocast)
            del held
            return tracker.peak(began)

    def sampling(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        caches: Callable[[], Iterable[Any]],
        *,
        others: Iterable[nn.Module] = (),
    ) -> Peak:
        """Sample completions, while the gradients of the step before are still there.

        Args:
            model: as `placed` returned it, perhaps wrapped.
            optimizer: over its parameters.
            caches: `GenerateSampler.first_and_last` of the model, with its arguments.
            others: further models that stay on the device.

        Raises:
            RehearsalError: it needs values.
        """
        with _explained():
            tracker = Tracker(self.allocated)
            self._hold(tracker, model, optimizer, others)
            with torch.random.fork_rng(devices=[]), tracker:
                with tracker.counting("gradients"):
                    held = [torch.empty_like(p) for p in trainable(model)]
                began = tracker.position
                for cache in caches():
                    for layer in getattr(cache, "layers", ()):
                        for tensor in (getattr(layer, name, None) for name in ("keys", "values")):
                            if isinstance(tensor, torch.Tensor):
                                tracker.mark(tensor, "cache")
            del held
            return tracker.peak(began)

    def _hold(self, tracker: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer, others: Iterable[nn.Module]) -> None:
        for each in (model, *others):
            tracker.hold(tensors_of(each), "weights")
        tracker.hold(_state(optimizer), "optimizer")


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what a kernel says that needs values into a RehearsalError."""
    try:
        with warnings.catch_warnings():
            # Of a number with data that meets others without, torch itself looks at the gradient.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            yield
    except (RuntimeError, AssertionError, TypeError, ValueError, AttributeError, LookupError) as error:
        # torch says that data is missing in errors of these kinds, and models, which meet tensors without data, in others.
        # What this package itself raises otherwise is a defect.
        if getattr(error, "exit_status", None) is not None or (not isinstance(error, RuntimeError) and _is_ours(error)):
            raise
        text = " ".join(str(error).split())[:200]
        raise RehearsalError(
            f"a computation needs values that only the loaded model has ({type(error).__name__}: {text})"
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Return whether an error was raised in a file of this package, and not in what it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == __name__.partition(".")[0]


@contextmanager
def _counted(tracker: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say what tensors are for while a step runs: gradients, the head's, the optimizer's."""
    before: list[str] = []
    handles: list[Any] = [
        parameter.register_post_accumulate_grad_hook(lambda p: None if p.grad is None else tracker.mark(p.grad, "gradients"))
        for parameter in trainable(model)
    ]
    if (last := head(model)) is not None:
        handles += [
            last.register_forward_pre_hook(lambda *_: before.append(tracker.begin("head"))),
            last.register_forward_hook(lambda *_: tracker.begin(before.pop()) and None, always_call=True),
        ]

    def moved(*_: Any) -> None:
        for tensor in _state(optimizer):
            tracker.mark(tensor, "optimizer")

    handles.append(optimizer.register_step_post_hook(moved))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model, and the constants beside quantized weights."""
    yield from model.buffers()
    for parameter in model.parameters():
        yield parameter
        state: Any = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = getattr(state, "state2", None)


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the state that an optimizer has after its first step."""
    modes = [getattr(optimizer, name, None) for name in ("train", "eval")]
    for parameter in trainable(model):
        parameter.grad = torch.empty_like(parameter)
    if callable(modes[0]):
        modes[0]()
    optimizer.step()
    if callable(modes[1]):
        modes[1]()
    for parameter in model.parameters():
        parameter.grad = None
