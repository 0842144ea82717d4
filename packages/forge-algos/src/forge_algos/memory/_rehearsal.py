"""Training step, or an evaluation, of a model without data → the worst moment of its memory."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import attrs
import torch
from torch import nn

from forge_algos._errors import RehearsalError
from forge_algos._modules import head, keep_blocks, repeated_blocks, trainable
from forge_algos._parallel import ALONE, Alone
from forge_algos.adaptations.base._adaptation import Adaptation
from forge_algos.batches._media import MediaInputs, Way
from forge_algos.heads._media import MediaDocument, unreached_by_media
from forge_algos.memory._fake import fake_mode, without_data, without_launches
from forge_algos.memory._findings import adopt_findings, pass_for_probed
from forge_algos.memory._gathered import Gathered
from forge_algos.memory._media_rows import ExpectedRows, expected_media_rows
from forge_algos.memory._tracker import Peak, Products, Tracker
from forge_algos.objectives import Objective
from forge_algos.optimizers._schedules import schedule
from forge_algos.settings._moe import MoEAuxLoss
from forge_algos.settings._optimizer import OptimizerSettings
from forge_algos.training._average import WeightAverage
from forge_algos.training._evaluate import evaluate
from forge_algos.training._quantized_weights import QuantizedWeights
from forge_algos.training._train import train

_OF_DTYPES = re.compile(r"\bd?types?\b|scalar ?type|not implemented for '(Half|BFloat16)'", re.IGNORECASE)
"""What torch says where tensors of two dtypes meet: `mat1 and mat2 must have the same dtype`, `expected scalar type`, ..."""


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
    """Makes the context of the forwards; with `gather_dtype` of those that cannot do without."""
    product_scratch: Callable[[Products], Sequence[int]] | None = None
    """Products → the bytes that each takes for itself and gives back, on the device; None where they take none."""
    library_bytes: int = 0
    """Bytes that the libraries of kernels hold on the device from their first use on."""
    gather_dtype: torch.dtype | None = None
    """Dtype in which ranks gather float32 weights to compute with; None where each computes with its own. What is gathered at a
    time is not counted."""
    shares: Mapping[str, int] = attrs.field(factory=dict)
    """Part of the memory → how many ranks divide it: the worst moment is that of one of them. Parts are given whole."""
    media_way: Way | None = None
    """How rows with images hold several documents, as `media_rows` has it; None: packed, or in lines where rows of text run
    alone."""
    check: Callable[[], None] | None = None
    """Called before each kernel of a step or an evaluation; what it raises ends that."""
    _mode: Any = attrs.field(factory=fake_mode, init=False)
    _loaded: WeakSet[nn.Module] = attrs.field(factory=WeakSet, init=False)
    """Modules of the outlines; no longer than somebody else holds them."""
    _shortened: WeakSet[nn.Module] = attrs.field(factory=WeakSet, init=False)
    """Those of outlines that have fewer blocks than the model."""
    _runs: list[bool] = attrs.field(factory=list, init=False)
    """Of each draft, whether it computes without autocast."""

    def model(
        self, outline: nn.Module, draft: nn.Module | None, *, packed: bool = True, blocks: int | None = None
    ) -> nn.Module:
        """Let an outline on the meta device pass for a loaded and probed model; returns it.

        Args:
            outline: on the meta device, as large as the model.
            draft: small random model of the same configuration, through `keep_documents_apart`, or None.
            packed: without a draft, whether documents share a row.
            blocks: how many of its blocks are kept, all of which are alike; what `step` and `evaluation` return then has
                `stages`, from which those of the whole model follow. All by default.

        Raises:
            RehearsalError: its blocks are not alike, or there are no more than `blocks`.
        """
        if blocks is not None:
            if not keep_blocks(outline, blocks):
                raise RehearsalError(f"its blocks are not alike, or no more than {blocks}")
            self._shortened.update(outline.modules())
        with _explained(), torch.random.fork_rng(devices=[]):
            adopt_findings(outline, draft, device=self.device, packing="on" if packed else "off")
            if draft is not None and self.gather_dtype is not None:
                self._runs.append(_runs_as_it_is(draft, self.device))
        self._loaded.update(outline.modules())
        return outline

    @contextmanager
    def adapting(self) -> Iterator[None]:
        """Enclose what puts weights beside those of an outline: `adapt`, a value head.

        Raises:
            RehearsalError: it needs values.
        """
        with _explained(), without_launches(), torch.random.fork_rng(devices=[]), Tracker():
            yield

    def placed(self, model: nn.Module) -> nn.Module:
        """Put an adapted outline on the device, without data, for an optimizer to be made."""
        without_data(model, self._mode, self.device)
        pass_for_probed(model, device=self.device, media_way=self.media_way)
        return model

    def unreached(self, model: nn.Module, document: MediaDocument) -> list[str]:
        """Return what `unreached_by_media` does, of a placed model.

        Raises:
            RehearsalError: it needs values.
        """
        with _explained(), without_launches(), torch.random.fork_rng(devices=[]), Tracker():
            return unreached_by_media(model, document, device=self.device, autocast=self.autocast)

    def media_rows(
        self,
        model: nn.Module,
        documents: Sequence[MediaDocument],
        *,
        packing: bool,
        join: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]] = list,
    ) -> ExpectedRows:
        """Return what `expected_media_rows` does, of a placed model.

        Raises:
            RehearsalError: it needs values.
        """
        with _explained(), without_launches(), torch.random.fork_rng(devices=[]), Tracker():
            return expected_media_rows(model, documents, device=self.device, packing=packing, join=join)

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
        router_aux_loss_coef: float | None = None,
        keep_casts: bool = False,
        average: WeightAverage | None = None,
        quantized: QuantizedWeights | None = None,
    ) -> Peak:
        """Take a step on `micro_batches`, as `train` does.

        Args:
            model: as `placed` returned it, perhaps wrapped.
            optimizer: over its parameters.
            micro_batches: of one rank.
            objective: makes what is learned.
            adaptation: what `adapt` returned.
            others: further models that stay on the device.
            first: whether it is a run's first step: state that the optimizer has from former rehearsals is dropped.
            buckets: whether gradients lie in buffers that stay from step to step, as those of DistributedDataParallel.
            max_grad_norm: as of `train`.
            moe_aux_loss: as of `train`.
            router_aux_loss_coef: as of `train`.
            keep_casts: as of `train`.
            average: as of `train`.
            quantized: as of `train`, of the model as `placed` returned it.

        Raises:
            RehearsalError: it needs values.
        """

        def work(tracker: Tracker, parallel: Alone, autocast: Callable[[], AbstractContextManager[Any]]) -> int:
            with _counted(tracker, model, optimizer):
                if not first and not optimizer.state:
                    _make_state(model, optimizer)
                if average is not None and not first:  # the first step itself keeps what it begins with, behind its backward
                    with tracker.counting("optimizer"):
                        average.before_step()
                began = tracker.position
                for _ in train(
                    model,
                    [micro_batches],
                    objective=objective(),
                    optimizer=optimizer,
                    scheduler=schedule(optimizer, OptimizerSettings(), num_steps=4),
                    max_grad_norm=max_grad_norm,
                    device=self.device,
                    autocast=autocast,
                    parallel=parallel,
                    adaptation=adaptation,
                    on_nan="skip",
                    moe_aux_loss=moe_aux_loss,
                    router_aux_loss_coef=router_aux_loss_coef,
                    keep_casts=keep_casts,
                    average=average,
                    quantized=None if quantized is None else _Rounding(tracker, quantized),
                ):
                    pass
            for parameter in model.parameters():
                parameter.grad = None
            return began

        if first:
            optimizer.state.clear()
        held = sum(self.allocated(p.numel() * p.element_size()) for p in trainable(model))
        return self._peak(work, model, optimizer, others, always={"gradients": held} if buckets else None)

    def evaluation(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        objective: Callable[[], Objective],
        others: Iterable[nn.Module] = (),
        quantized: QuantizedWeights | None = None,
    ) -> Peak:
        """Measure the loss of a batch, as `evaluate` does; arguments and errors as of `step`.

        The gradients of the step before are still there.
        """

        def work(tracker: Tracker, parallel: Alone, autocast: Callable[[], AbstractContextManager[Any]]) -> int:
            with _counted(tracker, model, optimizer), _beside_gradients(tracker, model) as began:
                rounded = nullcontext() if quantized is None else _Rounding(tracker, quantized).in_place()
                with parallel.micro_batch(last=True), rounded:
                    evaluate(model, [batch], objective=objective(), device=self.device, autocast=autocast)
                return began

        return self._peak(work, model, optimizer, others)

    def sampling(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        caches: Callable[[], Iterable[Any]],
        *,
        others: Iterable[nn.Module] = (),
        quantized: QuantizedWeights | None = None,
    ) -> Peak:
        """Sample completions, while the gradients of the step before are still there.

        Args:
            model: as `placed` returned it, perhaps wrapped.
            optimizer: over its parameters.
            caches: `GenerateSampler.first_and_last` of the model, with its arguments.
            others: further models that stay on the device.
            quantized: as of `train`, of the model as `placed` returned it.

        Raises:
            RehearsalError: it needs values.
        """

        def work(tracker: Tracker, parallel: Alone, _: Callable[[], AbstractContextManager[Any]]) -> int:
            rounded = nullcontext() if quantized is None else _Rounding(tracker, quantized).in_place()
            with _beside_gradients(tracker, model) as began, rounded, parallel.micro_batch(last=True):
                for cache in caches():
                    _mark_cache(tracker, cache)
                    del cache  # no longer than the sampler holds it
                return began

        return self._peak(work, model, optimizer, others)

    def _peak(
        self,
        work: Callable[[Tracker, Alone, Callable[[], AbstractContextManager[Any]]], int],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: Iterable[nn.Module],
        always: Mapping[str, int] | None = None,
    ) -> Peak:
        """Do work and return its peak; `work` returns the position from which on it counts.

        Weights that are gathered in 16 bits compute without autocast, and under it where a small model does not run so: tensors
        without data are multiplied whatever their dtypes.
        """
        others = list(others)

        def tried(autocast: Callable[[], AbstractContextManager[Any]]) -> Peak:
            tracker = Tracker(self.allocated, self.product_scratch, self.check)
            for each in (model, *others):
                tracker.hold(tensors_of(each), "weights")
            tracker.hold(_state(optimizer), "optimizer")
            dtype = self.gather_dtype
            with _explained(), without_launches(), torch.random.fork_rng(devices=[]):
                parallel = ALONE if dtype is None else Gathered(model, dtype, self._loaded, tracker)
                with tracker, self._staged(tracker, model, optimizer):
                    began = work(tracker, parallel, autocast)
                return tracker.peak(began, always=always, library_bytes=self.library_bytes, shares=self.shares)

        alone = self.gather_dtype is not None and all(self._runs)
        return tried(nullcontext if alone else self.autocast)

    @contextmanager
    def _staged(self, tracker: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let the tracker know where blocks begin, of a model that has fewer of them than it should."""
        handles: list[Any] = []
        for number, block in enumerate(repeated_blocks(model)):
            if block in self._shortened:
                handles.append(block.register_forward_pre_hook(lambda *_, n=number: tracker.enter("forward", n)))
                handles.append(block.register_forward_hook(lambda *given, n=number: _enter_backward(tracker, given[-1], n)))
        if handles:
            handles.append(optimizer.register_step_pre_hook(lambda *_: tracker.enter("optimizer")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _enter_backward(tracker: Tracker, output: Any, number: int) -> None:
    """Let the backward stage of a block begin with the gradient of its output."""
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, torch.Tensor) and first.requires_grad:

        def begin(_: torch.Tensor) -> None:
            tracker.enter("backward", number)

        first.register_hook(begin)


def _runs_as_it_is(model: nn.Module, device: torch.device) -> bool:
    """Return whether a model whose weights are in 16 bits computes without autocast.

    Raises:
        RuntimeError: it does not compute, and not for the dtypes that meet in it.
    """
    known = torch.amp.is_autocast_available(device.type)
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if known else nullcontext():
        try:
            model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=device), use_cache=False)
        except RuntimeError as error:
            if not _OF_DTYPES.search(str(error)):
                raise
            return False
    return True


@contextmanager
def _beside_gradients(tracker: Tracker, model: nn.Module) -> Iterator[int]:
    """Hold the gradients of a former step inside the block; yields the position of its begin."""
    with tracker.counting("gradients"):
        held = [torch.empty_like(p) for p in trainable(model)]
    yield tracker.position
    del held


class _Rounding(NamedTuple):
    """`QuantizedWeights` whose copy of the unrounded weights is a part of its own."""

    tracker: Tracker
    quantized: QuantizedWeights

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the rounded weights in place inside the block."""
        with ExitStack() as stack:
            with self.tracker.counting("unrounded"):
                stack.enter_context(self.quantized.in_place())
            yield


def _mark_cache(tracker: Tracker, cache: Any) -> None:
    """Count the keys and values of all layers as the cache."""
    for layer in getattr(cache, "layers", ()):
        for tensor in (getattr(layer, name, None) for name in ("keys", "values")):
            if isinstance(tensor, torch.Tensor):
                tracker.mark(tensor, "cache")


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
