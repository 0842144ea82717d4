"""How a model's learned positions are scored: decided once, with the reason.

The fast way computes in the head's place, from the hidden states that the model feeds its head and the head's weight: logits
exist for a few hundred labelled rows at a time. It is right only if the head is that weight and nothing else, or something that
the losses can apply (a scale, a softcap), so the model itself is tested first. Otherwise the model computes its own logits, at
the labelled positions alone. Either way the forward is one call of the outermost module.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, decoder, head
from forge_algos.heads._chunks import rows_at_once
from forge_algos.heads._forward_override import compute_beside, compute_inside
from forge_algos.heads._layout import lay_out
from forge_algos.heads._probe import PROBED_TOKENS, problem_of, transform_of
from forge_algos.heads._rows_over_ranks import RowsOverRanks, rows_over_ranks
from forge_algos.losses import LossTerms, _check
from forge_algos.losses._likelihood import Likelihood
from forge_algos.losses._nll import nll_of_rows
from forge_algos.losses._numeric import wide
from forge_algos.losses._rows import Given, LogitSource, Projected, Tensors, product_dtype
from forge_algos.losses._token_logps import logps_and_collision_of_rows, logps_and_entropy_of_rows, logps_of_rows
from forge_algos.losses.distillation._aligned import SharedTokens
from forge_algos.losses.distillation._aligned_rows import SpanRows, Unshared, aligned_of_rows, logps_before
from forge_algos.losses.distillation._compare import Compared, compare_rows
from forge_algos.losses.distillation._rows import distillation_of_rows
from forge_algos.losses.distillation._top import TopTokens, top_distillation_of_rows, top_of_rows

_assumed: WeakKeyDictionary[nn.Module, tuple[Literal["chunked", "logits"], str]] = WeakKeyDictionary()
"""Causal model without numbers → name and reason of its head's scoring, which no probe can find on it."""

Inputs = dict[str, Any]
Beside = Callable[[torch.Tensor], torch.Tensor]
Compute = Callable[[LogitSource, Tensors], tuple[torch.Tensor, ...]]


@attrs.frozen(eq=False)
class Held:
    """What a forward left of its rows' logits, which are computed a chunk at a time."""

    source: LogitSource
    tensors: Tensors
    """Without gradients, and of their own where the model's weights may be others by then."""


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """Scoring of the learned positions of a model, and the reason for it.

    Every method takes the forward's `inputs` of one row [1, T] and `rows` int64[M], the positions whose logits are meant (a
    position may stand there more than once), and is one forward of the model.
    """

    model: nn.Module = attrs.field(repr=False)
    name: Literal["chunked", "logits"]
    """\"chunked": in chunks in the head's place, on its weight.
    "logits": from the model's own logits at those rows."""
    reason: str
    scale: float = 1.0
    softcap: float | None = None

    def nll(
        self,
        inputs: Inputs,
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        dft: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> LossTerms:
        """Sum the negative log-likelihood of targets int64[M], with the options of `losses.nll`.

        With weights float32[M] each term is multiplied by its weight; the count is M all the same.

        Raises:
            LossError: a number out of range.
        """
        likelihood = Likelihood(dft=dft, label_smoothing=label_smoothing, z_loss=z_loss)
        found: list[LossTerms] = []
        ranks = rows_over_ranks(self.model)
        mine = ranks.part(len(rows))

        def compute(source: LogitSource, tensors: Tensors) -> tuple[torch.Tensor]:
            own = None if weights is None else weights[mine]
            found.append(nll_of_rows(source, tensors, targets[mine], likelihood, own))
            return (found[0].sum,)

        (loss,) = self._scored(inputs, rows[mine], compute)
        return _over(ranks, found[0]._replace(sum=loss), len(rows))

    def logps(
        self,
        inputs: Inputs,
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float = 1.0,
        beside: Beside | None = None,
    ) -> Any:
        """Compute log-probabilities float32[M] of targets int64[M], with gradients.

        With `beside` return the pair of that and `beside(hidden)`, a tensor made of the hidden states float[T, D] that the head
        is fed; gradients run through both, also where the model is divided over ranks, if the modules that it calls belong to
        the model.

        Args:
            inputs: of the forward.
            rows: int64[M].
            targets: int64[M].
            temperature: above 0; divides the logits.
            beside: computes a tensor from the hidden states.

        Raises:
            LossError: a temperature that is not above 0, or `beside` for a model without accessible hidden states.
        """
        ranks = rows_over_ranks(self.model)
        mine = ranks.part(len(rows))

        def compute(source: LogitSource, tensors: Tensors) -> tuple[torch.Tensor]:
            return (logps_of_rows(source, tensors, targets[mine]),)

        part, *rest = self._scored(inputs, rows[mine], compute, temperature=temperature, beside=beside)
        logps = ranks.gather(part, len(rows))
        return (logps, *rest) if beside is not None else logps

    def logps_and_entropy(
        self,
        inputs: Inputs,
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float = 1.0,
        beside: Beside | None = None,
        learned: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Compute (logps, entropy) or (logps, entropy, beside's), float32[M] each in nats.
        The entropy is that of the rows' distributions, with a gradient where it is `learned`.
        """
        of_rows = partial(logps_and_entropy_of_rows, learned=learned)
        return self._logps_and(of_rows, inputs, rows, targets, temperature=temperature, beside=beside, learned=learned)

    def logps_and_collision(
        self, inputs: Inputs, rows: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (logps, log Σ p²), float32[M] each, the sum over the vocabulary.
        It is that of the rows' distributions, without a gradient.
        """
        logps, collision = self._logps_and(logps_and_collision_of_rows, inputs, rows, targets, temperature=temperature)
        return logps, collision

    def _logps_and(
        self,
        of_rows: Callable[[LogitSource, Tensors, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        inputs: Inputs,
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float = 1.0,
        beside: Beside | None = None,
        learned: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Compute log-probabilities, a number beside each, and `beside`'s tensor.
        The number has a gradient if it is `learned`.
        """
        further: list[torch.Tensor] = []
        ranks = rows_over_ranks(self.model)
        mine = ranks.part(len(rows))

        def compute(source: LogitSource, tensors: Tensors) -> tuple[torch.Tensor, ...]:
            logps, found = of_rows(source, tensors, targets[mine])
            if learned:
                return logps, found
            further.append(found)
            return (logps,)

        part, *rest = self._scored(inputs, rows[mine], compute, temperature=temperature, beside=beside)
        if learned:
            further.append(rest.pop(0))
        return (ranks.gather(part, len(rows)), ranks.gather(further[0], len(rows)), *rest)

    def distillation(
        self,
        inputs: Inputs,
        rows: torch.Tensor,
        teacher: "Head | Held",
        teacher_inputs: Inputs | None = None,
        *,
        beta: float,
        temperature: float,
        weights: torch.Tensor | None = None,
        teacher_rows: torch.Tensor | None = None,
    ) -> LossTerms:
        """Sum the generalised JSD between a teacher's rows and the model's.
        Gradients are those of the model.

        The divergence is that of `losses.distillation`. Neither model's logits are ever whole: the model runs while the teacher
        is within its head, so that both weights are at hand, or after it, if the teacher is what `hold` kept (at the same
        temperature). `teacher_rows` int64[M] are `rows` by default. With weights float32[M] each row's divergence is multiplied
        by its weight; the count is M all the same.

        Returns:
            LossTerms: over the M rows, in nats. Stats: `kl`, KL(teacher ‖ model) after the temperature.

        Raises:
            LossError: β outside [0, 1], a temperature that is not above 0, or two vocabularies.
        """
        found: list[LossTerms] = []
        wanted = torch.is_grad_enabled()
        ranks = rows_over_ranks(self.model)
        mine = ranks.part(len(rows))
        own = None if weights is None else weights[mine]

        def taught(teacher_source: LogitSource, teacher_tensors: Tensors) -> tuple[()]:
            def compute(source: LogitSource, tensors: Tensors) -> tuple[torch.Tensor]:
                found.append(distillation_of_rows(source, tensors, (teacher_source, teacher_tensors), beta=beta, weights=own))
                return (found[0].sum,)

            with torch.set_grad_enabled(wanted):
                (loss,) = self._scored(inputs, rows[mine], compute, temperature=temperature)
            found.append(found[0]._replace(sum=loss))
            return ()

        if isinstance(teacher, Held):
            taught(teacher.source, teacher.tensors)
        else:
            theirs = rows if teacher_rows is None else teacher_rows
            with torch.no_grad():
                teacher._scored(teacher_inputs or inputs, theirs[mine], taught, temperature=temperature)
        return _over(ranks, found[1], len(rows))

    def top_distillation(
        self,
        inputs: Inputs,
        rows: torch.Tensor,
        top: TopTokens,
        *,
        beta: float,
        temperature: float,
        weights: torch.Tensor | None = None,
    ) -> LossTerms:
        """Sum `losses.top_distillation` from a teacher's likeliest tokens at the rows.
        The count is M, whatever the `weights` float32[M].
        """
        found: list[LossTerms] = []
        ranks = rows_over_ranks(self.model)
        mine = ranks.part(len(rows))
        own = None if weights is None else weights[mine]

        def compute(source: LogitSource, tensors: Tensors) -> tuple[torch.Tensor]:
            found.append(top_distillation_of_rows(source, tensors, top.part(mine), beta=beta, weights=own))
            return (found[0].sum,)

        (loss,) = self._scored(inputs, rows[mine], compute, temperature=temperature)
        return _over(ranks, found[0]._replace(sum=loss), len(rows))

    def top(
        self, inputs: Inputs, rows: torch.Tensor, k: int, *, below: int | None = None, temperature: float = 1.0
    ) -> TopTokens:
        """Find the k likeliest next tokens at the rows, of the ids below `below`, without gradients."""
        with torch.no_grad():
            return TopTokens(*self._scored(inputs, rows, partial(top_of_rows, k=k, below=below), temperature=temperature))

    def aligned_distillation(
        self,
        inputs: Inputs,
        spans: SpanRows,
        teacher: "Head",
        teacher_inputs: Inputs,
        teacher_spans: SpanRows,
        *,
        shared: SharedTokens,
        unshared: Unshared,
        parts: tuple[float, float],
        beta: float,
        temperature: float,
        weights: torch.Tensor | None = None,
    ) -> LossTerms:
        """Sum the distance to a teacher with another tokenizer over G spans of the same text.
        Gradients are those of the model.

        The distance is that of `losses.aligned_distillation`, with the weights `parts`; neither model's logits are ever whole.
        The count is G, whatever the `weights` float32[G].

        Returns:
            LossTerms: over the G spans. Stats: `matched` and `unmatched`.
        """
        found: list[LossTerms] = []
        wanted, number = torch.is_grad_enabled(), len(spans.last)
        ranks = rows_over_ranks(self.model)
        mine = ranks.part(number)
        own = None if weights is None else weights[mine]
        if mine != slice(0, number):
            spans, teacher_spans = spans.of_spans(mine), teacher_spans.of_spans(mine)

        def taught(teacher_source: LogitSource, teacher_tensors: Tensors) -> tuple[()]:
            their_before = logps_before(teacher_source, _first(teacher_tensors, len(teacher_spans.of)), teacher_spans)
            theirs = teacher_source, _rest(teacher_tensors, len(teacher_spans.of))

            def compute(source: LogitSource, tensors: Tensors) -> tuple[torch.Tensor]:
                before = logps_before(source, _first(tensors, len(spans.of)), spans), their_before
                how: Any = {"shared": shared, "unshared": unshared, "parts": parts, "beta": beta, "weights": own}
                found.append(aligned_of_rows(source, _rest(tensors, len(spans.of)), theirs, before, **how))
                return (found[0].sum,)

            with torch.set_grad_enabled(wanted):
                (loss,) = self._scored(inputs, torch.cat((spans.before, spans.last)), compute, temperature=temperature)
            found.append(found[0]._replace(sum=loss))
            return ()

        with torch.no_grad():
            rows = torch.cat((teacher_spans.before, teacher_spans.last))
            teacher._scored(teacher_inputs, rows, taught, temperature=temperature)
        return _over(ranks, found[1], number)

    def hold(self, inputs: Inputs, rows: torch.Tensor, *, temperature: float = 1.0) -> Held:
        """Keep what the rows' logits are computed from, for the same model under other weights.

        One forward without gradients. Hidden states [M, D] are kept, not logits [M, V], where the head is scored in chunks; the
        head's weight is copied where it is trained or divided over ranks.
        """
        found: list[Held] = []
        mine = rows_over_ranks(self.model).part(len(rows))
        weight: Any = getattr(head(self.model), "weight", None)
        # FSDP and ZeRO free a gathered weight after the forward; a trained one may be exchanged.
        lasts = weight is not None and not weight.requires_grad and not hasattr(weight, "full_tensor")
        lasts = lasts and not hasattr(weight, "ds_id")

        def keep(source: LogitSource, tensors: Tensors) -> tuple[()]:
            first, *others = (None if tensor is None else tensor.detach() for tensor in tensors)
            rest = [tensor if lasts or tensor is None else tensor.clone() for tensor in others]
            found.append(Held(source, (first, *rest)))
            return ()

        with torch.no_grad():
            self._scored(inputs, rows[mine], keep, temperature=temperature)
        return found[0]

    def compare(self, inputs: Inputs, rows: torch.Tensor, targets: torch.Tensor, base: "Head | Held") -> Compared:
        """Compute KL(base ‖ model) and both models' losses at M rows, without gradients.

        Args:
            inputs: of both forwards.
            rows: int64[M].
            targets: int64[M], the tokens that follow the rows.
            base: head of another model, or what `hold` kept of this one.

        Raises:
            LossError: two vocabularies.
        """
        found: list[Compared] = []
        ranks = rows_over_ranks(self.model)
        mine = ranks.part(len(rows))

        def beneath(base_source: LogitSource, base_tensors: Tensors) -> tuple[()]:
            def compute(source: LogitSource, tensors: Tensors) -> tuple[()]:
                found.append(compare_rows(source, tensors, (base_source, base_tensors), targets[mine]))
                return ()

            self._scored(inputs, rows[mine], compute)
            return ()

        with torch.no_grad():
            if isinstance(base, Held):
                beneath(base.source, base.tensors)
            else:
                base._scored(inputs, rows[mine], beneath)
        return Compared(*(ranks.gather(part, len(rows)) for part in found[0]))

    def _scored(
        self,
        inputs: Inputs,
        rows: torch.Tensor,
        compute: Compute,
        *,
        temperature: float = 1.0,
        beside: Beside | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run `compute` on the rows' logits in one forward, and `beside` on the hidden states."""
        _check.number("temperature", temperature, above=0)
        if self.name == "logits":
            return self._from_logits(inputs, rows, compute, temperature, beside)
        linear = head(self.model)
        assert isinstance(linear, nn.Linear)
        layout = lay_out(self.model, inputs)

        def inside(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = layout.packed(hidden)
            source = Projected(
                product=product_dtype(linear.weight),
                scale=self.scale,
                softcap=self.softcap,
                temperature=temperature,
                chunk_rows=rows_at_once(self.model),
            )
            # Not hidden[0], whose backward pass fills a row [1, T, D] with zeros to put the gradient into it.
            hidden_TD = hidden.squeeze(0)
            # A position that several samples learn from gets a gradient from each.
            summed = hidden_TD if inputs.get("kv_rows") is None else hidden_TD.to(wide(hidden_TD.dtype))
            hidden_MD = summed.index_select(0, rows).to(hidden_TD.dtype)
            found = compute(source, (hidden_MD, linear.weight, linear.bias))
            return found if beside is None else (*found, beside(hidden_TD))

        # The model gets one row for all, which it may scale or cap at no cost.
        return compute_inside(self.model, linear, layout.inputs, inside, shape=(1, 1, linear.out_features))

    def _from_logits(
        self, inputs: Inputs, rows: torch.Tensor, compute: Compute, temperature: float, beside: Beside | None
    ) -> tuple[torch.Tensor, ...]:
        layout = lay_out(self.model, inputs)
        inputs = layout.inputs
        # With documents in lines, the same positions of all lines would be kept: there all positions are.
        keeps = layout.lines is None and "logits_to_keep" in inspect.signature(causal_model(self.model).forward).parameters
        if keeps:
            inputs = {**inputs, "logits_to_keep": rows}
        rest: list[torch.Tensor] = []
        if beside is None:
            logits = self.model(**inputs).logits
        else:
            body = decoder(self.model)
            if body is None:
                raise LossError(f"{type(causal_model(self.model)).__name__} has no decoder whose hidden states could be read")
            logits, *rest = compute_beside(self.model, body, inputs, lambda hidden: beside(layout.packed(hidden).squeeze(0)))
        logits = layout.packed(logits).squeeze(0)
        logits_MV = logits if keeps else logits.index_select(0, rows)
        source = Given(given=logits.dtype, temperature=temperature, chunk_rows=rows_at_once(self.model))
        return (*compute(source, (logits_MV,)), *rest)


def _first(tensors: Tensors, rows: int) -> Tensors:
    """Return what the first rows' logits are computed from; the first tensor has a row for each."""
    rowwise, *others = tensors
    assert rowwise is not None
    return rowwise[:rows], *others


def _rest(tensors: Tensors, rows: int) -> Tensors:
    """Return what the logits of the rows after the first ones are computed from."""
    rowwise, *others = tensors
    assert rowwise is not None
    return rowwise[rows:], *others


def _over(ranks: RowsOverRanks, part: LossTerms, rows: int) -> LossTerms:
    """Add up the terms of each rank's part of the rows."""
    stats = {name: ranks.sum(value) for name, value in part.stats.items()}
    return part._replace(sum=ranks.sum(part.sum), count=rows, stats=stats)


def choose_head(model: nn.Module, *, device: torch.device) -> Head:
    """Choose the fast way if it gives the model's own logits on a few tokens.

    Leaves the model's modes, its gradients and the random state as they were. Where a model is divided over ranks, every rank
    calls it, and all decide alike.
    """
    linear = head(model)
    if linear is None:
        return Head(model=model, name="logits", reason="the model names no head of its own")
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
        return Head(model=model, name="logits", reason=f"the head is no plain linear layer but {kind}")
    scale, softcap = transform_of(model)
    if (assumed := _assumed.get(causal_model(model))) is not None:
        return Head(model=model, name=assumed[0], reason=assumed[1], scale=scale, softcap=softcap)
    problem = problem_of(model, linear, device, scale, softcap)
    if problem:
        return Head(model=model, name="logits", reason=problem)
    how = "".join([f", scaled by {scale:g}" if scale != 1 else "", f", capped at {softcap:g}" if softcap else ""])
    return Head(
        model=model,
        name="chunked",
        reason=f"{type(linear).__name__} head{how} gives the model's own logits on {PROBED_TOKENS} tokens",
        scale=scale,
        softcap=softcap,
    )


def assume(model: nn.Module, name: Literal["chunked", "logits"], reason: str) -> None:
    """Let `choose_head` answer so for a model without numbers, instead of probing it."""
    _assumed[causal_model(model)] = name, reason
