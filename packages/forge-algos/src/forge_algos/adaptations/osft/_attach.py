"""Orthogonal subspace fine-tuning (OSFT, arXiv 2504.07097) of linear layers and experts.

Each target moves only in directions that its large singular values leave free. W [N, M] of a linear layer is U S Vᵀ, d =
min(N, M); the r directions of the smallest singular values are free, k = d − r protected. A stack [E, N, M] of expert matrices
is one target, of which each matrix is decomposed by itself and has r free directions. The rules and forms have a file each:
`_direct`, `_factors`, `_paper`. With osft_directions=inputs the protected directions are not those of large singular values but
the first principal components of what the layer is given, and puts out, on rows of earlier tasks.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._counted import counted
from forge_algos._errors import AdapterError, OptimizerError
from forge_algos._experts import expert_stacks
from forge_algos.adaptations.base._adaptation import Adaptation, Context, Importance, Moments
from forge_algos.adaptations.base._targets import resolve_targets
from forge_algos.adaptations.osft._bases import (
    Bases,
    Directions,
    Inputs,
    StackedDirections,
    stack_fingerprint,
    walk_bases,
    walk_stack,
)
from forge_algos.adaptations.osft._delta import CHILD, MARK, Delta, attach, attach_to_stack, is_transposed
from forge_algos.adaptations.osft._direct import Direct
from forge_algos.adaptations.osft._factors import Factors
from forge_algos.adaptations.osft._other_parameters import tied, train_rest
from forge_algos.adaptations.osft._paper import Protected
from forge_algos.adaptations.osft._ranks import free_ranks
from forge_algos.settings._adapter import AdapterSettings


@attrs.frozen(kw_only=True, eq=False)
class Target:
    """Linear layer or stack of expert matrices under OSFT."""

    module: nn.Module
    """The module that computes with the weight."""
    key: str = "weight"
    """Name of the weight in it."""
    parameter: str
    """Full name of the weight."""
    shape: tuple[int, int]
    """[N, M] of the weight, or of each matrix of a stack."""
    experts: int | None = None
    """E, the number of matrices of a stack; None of a linear layer."""
    free: int
    """r, the number of free directions."""
    bases: str = ""
    """Fingerprint of its singular vectors; empty where all or none of its directions are free,
    and none are needed."""
    error: float = 0.0
    """Bound on what the singular vectors leave out, relative to ‖W‖."""
    note: str = ""
    """Remark for the log on how the singular vectors came to be."""
    others: Mapping[str, nn.Module] = {}
    """Further linear layers with the same weight (a shared block), by name, which compute with the same ΔW."""
    child: Delta | Protected | None = None
    """Module that adds ΔW, or keeps the weight's own moves off the protected directions;
    None where W trains or stays as it is."""

    @property
    def weight(self) -> nn.Parameter:
        """The weight, as the module has it now."""
        return getattr(self.module, self.key)


class OSFT(Adaptation):
    """Model whose targets move within their free directions, by the rule of `settings`."""

    def __init__(
        self, model: nn.Module, settings: AdapterSettings, targets: Mapping[str, Target], rest: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__(model)
        self._settings = settings
        self._targets = targets
        self._rest = rest
        self._by_weight = {target.parameter: target for target in targets.values()}
        self._children = [target.child for target in targets.values() if target.child is not None]

    @property
    def additions(self) -> Sequence[str]:
        """Names of the modules `osft` beside the targets that have one."""
        children = {target.child for target in self._targets.values() if target.child is not None}
        return [
            f"{name}.{CHILD}"
            for name, module in self.model.named_modules(remove_duplicate=False)
            if (child := getattr(module, CHILD, None)) is not None
            and (child in children or not children.isdisjoint(child.children()))
        ]

    @property
    def plan(self) -> dict[str, dict[str, Any]]:
        """Target → its shape, free and protected directions, fingerprint and error bound."""
        return {
            name: {
                "shape": [*([] if target.experts is None else [target.experts]), *target.shape],
                "free": target.free,
                "protected": min(target.shape) - target.free,
                "bases": target.bases,
                "error": target.error,
                # Of singular vectors nothing needs to be said.
                **({} if self._settings.protects == "weights" else {"directions": self._settings.protects}),
                # Of a linear layer it follows from the name.
                **({} if target.experts is None else {"tensor": target.parameter}),
                **({"transposed": True} if is_transposed(target.module) else {}),
            }
            for name, target in self._targets.items()
        }

    @property
    def identity(self) -> str:
        """sha256 of the plan: with other singular vectors its state means another ΔW."""
        return hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()

    @property
    def _projects(self) -> bool:
        return any(isinstance(child, Factors | Protected) for child in self._children)

    def describe(self) -> list[str]:
        """Return lines for the log: the rule, the targets' free directions, what else trains."""
        rule = self._settings.osft_rule
        form = f"{rule}, {self._settings.osft_form}" if rule == "strict" else rule
        shares: dict[tuple[int, int], int] = {}
        for target in self._targets.values():
            key = (target.free, min(target.shape))
            shares[key] = shares.get(key, 0) + 1
        listed = sorted(shares.items(), key=lambda item: -item[1])
        free = ", ".join(f"{free} of {d} ({count})" for (free, d), count in listed[:4])
        more = f" and {len(listed) - 4} other shares" if len(listed) > 4 else ""
        rest = [f"{kind} ({len(names)} tensors)" for kind, names in self._rest.items()]
        moving = set(self._rest)
        if tied(self.model) and {"embeddings", "head"} & moving:
            rest.append("the head is tied to the embeddings: one weight, which trains")
            moving |= {"embeddings", "head"}
        frozen = [kind for kind in ("embeddings", "head", "norms", "biases") if kind not in moving]
        worst = max((target.error for target in self._targets.values()), default=0.0)
        if self._settings.protects == "inputs":
            quality = (
                "protected is where inputs and outputs are largest on rows of earlier tasks, with all but "
                f"{worst:.2%} of the inputs' squares or more"
            )
        else:
            quality = f"singular vectors within {worst:.1e} of the weights"
        if any(target.free < min(target.shape) for target in self._targets.values()):
            frozen.insert(0, "the targets' protected directions")
        experts = sum(target.experts or 0 for target in self._targets.values())
        stacked = f" ({experts:,} expert matrices among them, each decomposed by itself)" if experts else ""
        return [
            f"OSFT ({form}): {counted(len(self._targets), 'targets')}{stacked}, free directions {free}{more}; {quality}",
            f"beside the targets trains: {', '.join(rest) or 'nothing'}; frozen: {', '.join(frozen) or 'nothing'}",
            *self._notes(),
            self._memory(),
            *super().describe(),
        ]

    def _memory(self) -> str:
        """Return what is kept beside the weights, whole on every rank but under the paper's rule."""
        buffers = sum(b.nbytes for child in self._children for b in child.buffers())
        trained = sum(p.nbytes for child in self._children for p in child.parameters())
        return f"beside the weights: {buffers / 2**20:,.1f} MiB of singular vectors, {trained / 2**20:,.1f} MiB that train"

    def _notes(self) -> list[str]:
        """Return remarks on singular vectors, once for all targets that share one."""
        notes: dict[str, list[str]] = {}
        for name, target in self._targets.items():
            if target.note:
                notes.setdefault(target.note, []).append(name)
        others = {note: f" and {counted(len(names) - 1, 'others')}" for note, names in notes.items() if len(names) > 1}
        return [f"{names[0]}{others.get(note, '')}: {note}" for note, names in notes.items()]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose result is not the weights that it trains, if they are projected.
        Schedule-free is one: its averages are never projected.
        """
        if self._projects and callable(getattr(optimizer, "eval", None)):
            raise OptimizerError(
                f"{type(optimizer).__name__} gives averages of weights that osft_rule=paper and osft_form=factors never see, "
                "let alone project: take optimizer=adamw, or osft_rule=strict with osft_form=direct"
            )

    def before_step(self) -> None:
        """Remove from the gradients what points into protected directions.
        The direct form has nothing to do.
        """
        for child in self._children:
            child.before_step()

    def after_step(self) -> None:
        """Remove from the weights what the optimizer moved there all the same.
        The direct form has nothing to do.
        """
        for child in self._children:
            child.after_step()

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return W + ΔW, added up in float32 at least, for the weight of a target with a ΔW."""
        target = self._by_weight.get(name)
        if target is None or not isinstance(target.child, Delta):
            return tensor
        wide = torch.promote_types(tensor.dtype, torch.float32)
        return (tensor.detach().to(wide) + target.child.moved().to(device=tensor.device)).to(tensor.dtype)


def attach_osft(model: nn.Module, settings: AdapterSettings, context: Context) -> OSFT:
    """Let each target of the model move within its free directions only (adapter=osft).

    Raises:
        AdapterError: a target is no weight of its own, the model is under OSFT already, or nothing would train.
    """
    if hasattr(model, MARK):
        raise AdapterError("the model is under OSFT already: start from its export, which is a plain model")
    targets = _targets(model, settings)
    shapes = {name: target.shape for name, target in targets.items()}
    free = context.free
    if free is None:
        free = free_ranks(shapes, settings, _importance(settings, context.importance, list(targets)))
    _check_free(shapes, free)
    for parameter in model.parameters():
        parameter.requires_grad = False
    targets = {name: attrs.evolve(target, free=free[name]) for name, target in targets.items()}
    for name, found in _bases(targets, settings, context, _moments(model, settings, targets, context)):
        targets[name] = _attached(targets[name], found, settings)
    for target in targets.values():
        if target.free == min(target.shape) or isinstance(target.child, Protected):
            target.weight.requires_grad = True
    rest = train_rest(model, settings.osft_train_rest)
    if not any(p.requires_grad for p in model.parameters()):
        raise AdapterError(
            "unfreeze_rank_ratio leaves no target a free direction, and osft_train_rest names nothing: nothing would train; "
            "raise the ratio"
        )
    setattr(model, MARK, _unswitchable(targets, rest))
    return OSFT(model, settings, targets, rest)


_MOMENT_BYTES = 1 << 30
"""Bytes of second moments that are held at once."""


def _moments(model: nn.Module, settings: AdapterSettings, targets: Mapping[str, Target], context: Context) -> Moments | None:
    """Return what measures inputs, where osft_directions=inputs asks for it.

    None for a model without data.

    Raises:
        AdapterError: nothing measures them, or a target is a stack of experts.
    """
    if settings.protects == "weights":
        return None
    stacked = next((name for name, target in targets.items() if target.experts is not None), None)
    if stacked is not None:
        raise AdapterError(
            f"{stacked} is a stack of experts, each of which is given some tokens only, and osft_directions='inputs' (the "
            "default with osft_calibration_path) measures what a whole layer is given: leave experts out of target_modules "
            "(target_modules=attention), or leave both of these out"
        )
    if next(model.parameters()).is_meta:
        return None
    if context.moments is None:
        raise AdapterError(
            "osft_directions='inputs' protects what layers are given on rows of earlier tasks, and nothing measures that: give "
            "`adapt` moments=, a function that calls `osft_moments`"
        )
    return context.moments


def _bases(
    targets: Mapping[str, Target], settings: AdapterSettings, context: Context, moments: Moments | None
) -> Iterator[tuple[str, list[Bases]]]:
    """Yield the bases of each target with free and protected directions, of a stack E of them.
    Its weight is whole meanwhile.
    """
    ranks = context.ranks
    how: Any = {"svd": settings.osft_svd, "cache": context.cache, "ranks": ranks}
    partly = {name: target for name, target in targets.items() if 0 < target.free < min(target.shape)}
    protected = {name: min(target.shape) - target.free for name, target in partly.items()}
    weights = {name: target.weight for name, target in partly.items() if target.experts is None}
    # Matrices of layers are divided among the ranks, R at a time; those of a stack likewise, one stack after another.
    step = ranks.world_size if any(hasattr(target.weight, "ds_id") for target in partly.values()) else max(1, len(weights))
    if moments is not None:
        widest = max((8 * target.shape[0 if is_transposed(target.module) else 1] ** 2 for target in partly.values()), default=1)
        step = min(step, max(ranks.world_size, _MOMENT_BYTES // widest))
    names = list(weights)
    for start in range(0, len(names), step):
        group = {name: weights[name] for name in names[start : start + step]}
        inputs = measure = None
        if moments is not None:
            measure = partial(_inputs, moments, {name: partly[name] for name in group}, context.rows)
            # ZeRO-3's forwards gather the weights by themselves, so they are measured before that is done here.
            divided = any(hasattr(weight, "ds_id") for weight in group.values())
            inputs = measure() if divided else {name: _input(partly[name], None, context.rows) for name in group}
        with _whole(list(group.values())):
            fixed = context.free is not None
            for name, found in walk_bases(group, protected, **how, inputs=inputs, measure=measure, fixed=fixed):
                yield name, [found]
    for name, target in partly.items():
        if target.experts is not None:
            with _whole([target.weight]):
                yield name, walk_stack(target.weight, name, protected[name], **how)


def _inputs(moments: Moments, targets: Mapping[str, Target], rows: str) -> dict[str, Inputs]:
    """Measure what targets are given."""
    found = moments({name: (name, *target.others) for name, target in targets.items()})
    return {name: _input(target, found[name], rows) for name, target in targets.items()}


def _input(target: Target, moment: torch.Tensor | None, rows: str) -> Inputs:
    return Inputs(moment=moment, name=target.parameter, rows=rows, transposed=is_transposed(target.module))


def _whole(weights: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Gather weights that ZeRO-3 has partitioned (so DeepSpeed is loaded) while a block runs."""
    if not any(hasattr(weight, "ds_id") for weight in weights):
        return nullcontext()
    return sys.modules["deepspeed"].zero.GatheredParameters(weights)


def _attached(target: Target, found: Sequence[Bases], settings: AdapterSettings) -> Target:
    """Return the target with the module that limits its moves, made from its bases."""
    each = [Directions(bases, target.shape, target.free) for bases in found]
    directions = each[0] if target.experts is None else StackedDirections(each)
    form = Direct if settings.osft_form == "direct" else Factors
    child: Any = (
        Protected(directions, target.module, target.key) if settings.osft_rule == "paper" else form(directions, target.weight)
    )
    if target.experts is not None:
        attach_to_stack(target.module, target.key, child)
    elif isinstance(child, Protected):
        target.module.add_module(CHILD, child)
    else:
        for linear in (target.module, *target.others.values()):
            attach(linear, child)
    prints = [bases.fingerprint for bases in found]
    whole = prints[0] if target.experts is None else stack_fingerprint(prints)
    notes = dict.fromkeys(bases.note for bases in found if bases.note)
    error = max(bases.error for bases in found)
    return attrs.evolve(target, bases=whole, error=error, note="; ".join(notes), child=child)


def _targets(model: nn.Module, settings: AdapterSettings) -> dict[str, Target]:
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    stacks = expert_stacks(model)
    found: dict[str, Target] = {}
    selected = resolve_targets(model, settings.target_modules)
    selected_weights = {f"{name}.weight" for name in selected}

    def owner(parameter: str) -> nn.Module:
        return model.get_submodule(parameter.rpartition(".")[0])

    for name in selected:
        if stack := stacks.get(name):
            E, N, M = stack.shape
            found[name] = Target(module=stack.module, key=stack.key, parameter=stack.parameter, shape=(N, M), experts=E, free=0)
        else:
            module: Any = model.get_submodule(name)
            if not (isinstance(module, nn.Linear) or is_transposed(module)) or not module.weight.is_floating_point():
                raise AdapterError(
                    f"osft: {name} is of {type(module).__name__}, and only a linear layer in a float dtype has weights that "
                    "could be taken apart"
                )
            # The rows of a Conv1D's weight are its inputs; ΔW and its protected directions are turned likewise.
            rows, columns = _shape(module)
            found[name] = Target(module=module, parameter=f"{name}.weight", shape=(rows, columns), free=0)
        module = found[name].module
        # A module that stands in several places is one layer.
        names = [one for one in shared[id(found[name].weight)] if one in selected_weights or owner(one) is not module]
        if len(names) > 1:
            _join(found, name, names, selected_weights)
    return found


def _join(found: dict[str, Target], name: str, names: Sequence[str], selected: set[str]) -> None:
    """Join the target `name`, whose weight has several `names`, to the first that has it."""
    if not selected.issuperset(names) or found[name].experts is not None:
        raise AdapterError(
            f"osft: {' and '.join(names)} are one weight, and ΔW would move only one of them: leave {name} out of "
            "target_modules, or name the layers of all of them"
        )
    first = names[0].removesuffix(".weight")
    if first != name:
        module = found.pop(name).module
        found[first] = attrs.evolve(found[first], others={**found[first].others, name: module})


def _shape(linear: Any) -> tuple[int, int]:
    return (linear.nx, linear.nf) if is_transposed(linear) else (linear.out_features, linear.in_features)


def _importance(settings: AdapterSettings, importance: Importance | None, names: list[str]) -> Mapping[str, float] | None:
    if settings.osft_rank == "uniform":
        return None
    if importance is None:
        raise AdapterError("osft_rank='adaptive' needs each target's importance: give `importance` (osft_importance)")
    return importance(names)


def _check_free(shapes: Mapping[str, tuple[int, int]], free: Mapping[str, int]) -> None:
    for name, shape in shapes.items():
        if name not in free or not 0 <= free[name] <= min(shape):
            raise AdapterError(f"osft: {name} has {min(shape)} directions, and {free.get(name)} of them are to be free")


def _unswitchable(targets: Mapping[str, Target], rest: Mapping[str, Sequence[str]]) -> str:
    if any(isinstance(target.child, Protected) for target in targets.values()):
        return "osft_rule='paper'"
    if any(0 < min(target.shape) == target.free for target in targets.values()):
        return "a target all of whose directions are free"
    named = [kind for kind in rest if kind != "score"]
    return f"osft_train_rest={','.join(named)}" if named else ""
