"""OSFT run: its plan, base model and last export → what was protected and what moved."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from safetensors import SafetensorError, safe_open

import forge_accel
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge.reports._page import write_page
from forge.reports.osft._page import leaks, osft_page
from forge.saving._directories import last_export, run_values
from forge_algos.adaptations import Moved, osft_input_directions, osft_moved, osft_portrait


def inspect(run: str | Path, *, layer: str | None = None, html: str | Path | None = None) -> str:
    """Measure what an OSFT run moved, and write a page with a picture of one of its targets.

    Args:
        run: The run's directory, with its plan (osft/plan.json) and an export.
        layer: Name of the target to draw, or the last part of it; of several the one that moved most.
        html: Where to write the page; by default osft/inspect.html of the run. A page there is replaced.

    Returns:
        A summary; its last line is the path of the page.

    Raises:
        SettingsError: this is no OSFT run or it has no export yet, a file of it is damaged, its base model changed, `layer` is
            no target, or the page cannot be written.

    """
    root = Path(run).expanduser()
    plan = _read_plan(root)
    wanted = _matching(plan, layer)
    values = _read_settings(root)
    _check_base(root, values["model_path"])
    rule: Literal["strict", "paper"] = values["osft_rule"]
    cache = root / "osft" if values.get("osft_cache") is None else Path(values["osft_cache"])
    names = {name: _tensor(name, entry) for name, entry in plan.items()}
    before, after = (Weights(path, set(names.values())) for path in (values["model_path"], last_export(str(root))))
    for weights, place in ((before, values["model_path"]), (after, root / "hf_format")):
        if missing := sorted(set(names.values()) - set(weights)):
            raise SettingsError(
                f"{root / 'osft' / 'plan.json'}: names {missing[0]}, which {place} does not hold. Put the run's own back."
            )
    targets = [
        osft_moved(name, before[key].float(), after[key], plan[name], svd=values["osft_svd"], cache=cache)
        for name, key in names.items()
    ]
    shown = max((target for target in targets if target.name in wanted), key=lambda target: target.moved)
    key = names[shown.name]
    matrices = (before[key], after[key]) if shown.most is None else (before[key][shown.most], after[key][shown.most])
    old, new = (matrix.T for matrix in matrices) if shown.transposed else matrices
    of_inputs = None
    if plan[shown.name].get("directions") == "inputs":
        of_inputs = osft_input_directions(shown.name, before[key].float(), shown.protected, cache)
        if shown.transposed:
            of_inputs = attrs.evolve(of_inputs, U=of_inputs.Vh.T, Vh=of_inputs.U.T)
    portrait = osft_portrait(old.float(), new, protected=shown.protected, directions=of_inputs)
    others = {name: _moved(before, after, name) for name in after if name not in names.values()}
    dtype = str(after[key].dtype).removeprefix("torch.")
    file = root / "osft" / "inspect.html" if html is None else Path(html).expanduser()
    write_page(file, osft_page(root.resolve().name, rule, dtype, targets, shown, portrait, others), "html")
    return "\n".join([*_summary(targets, others, rule, dtype), f"page        {file}"])


class Weights(Mapping[str, Any]):
    """Tensors of a model by name, read one at a time from its files.

    A model that is a hub name, or whose files name its tensors otherwise than the architecture does, is loaded whole.
    """

    def __init__(self, path: str, needed: set[str]) -> None:
        self._files = {name: file for file in sorted(Path(path).glob("*.safetensors")) for name in _names(file)}
        self._loaded: Mapping[str, Any] | None = None
        if not needed <= self._files.keys():
            self._loaded = forge_dist.load_trained(path, dtype=forge_accel.float32, device="cpu").state_dict()

    def __getitem__(self, name: str) -> Any:
        if self._loaded is not None:
            return self._loaded[name]
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _damaged(file, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files if self._loaded is None else self._loaded)

    def __len__(self) -> int:
        return len(self._files if self._loaded is None else self._loaded)


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> SettingsError:
    return SettingsError(f"{file}: cannot be read: {error}. It is damaged; put it back.")


def _read_settings(root: Path) -> dict[str, Any]:
    """Read the run's settings. Raises SettingsError where those of OSFT are missing."""
    values = run_values(root)
    for name, known in (("osft_rule", ("strict", "paper")), ("osft_svd", ("exact", "randomized"))):
        if values.get(name) not in known:
            raise SettingsError(
                f"{root / 'config.yaml'}: {name} is {values.get(name)!r}, none of {', '.join(known)}. Put the run's own back."
            )
    return values


def _read_plan(root: Path) -> dict[str, Any]:
    """Read which directions of each target may move. Raises SettingsError without a plan."""
    file = root / "osft" / "plan.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise SettingsError(
            f"{root}: is no run with adapter=osft, for it has no osft/plan.json. Give a directory that `forge osft` (or "
            "adapter=osft of another verb) wrote."
        ) from None
    except ValueError as error:
        raise SettingsError(f"{file}: cannot be read: {error}.") from error
    if not isinstance(plan, dict) or not all(map(_is_target, plan.values())):
        raise SettingsError(
            f"{file}: is not what a run writes: each target has a shape and a number of free directions. Put it back."
        )
    if not plan:
        raise SettingsError(f"{file}: names no target, so nothing was protected.")
    return plan


def _is_target(target: Any) -> bool:
    """Return whether an entry of plan.json has a shape and a number of free directions."""
    if not isinstance(target, dict) or not isinstance(target.get("free"), int):
        return False
    shape = target.get("shape")
    return isinstance(shape, list) and len(shape) in (2, 3) and all(isinstance(size, int) for size in shape)


def _tensor(name: str, target: Mapping[str, Any]) -> str:
    """Return the name of a target's tensor: a layer's weight, or a stack of expert matrices."""
    return target.get("tensor", f"{name}.weight")


def _check_base(root: Path, model_path: str) -> None:
    """Raise SettingsError unless the base model is the one that the run began with."""
    try:
        began = json.loads((root / "run.json").read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{root / 'run.json'}: does not say which model the run began with ({error!r}). Put it back."
        ) from error
    if forge_dist.model_identity(model_path) != began:
        raise SettingsError(
            f"{model_path}: this base model is not the one that the run began with: it is gone, or its config.json or its "
            f"weights changed. Put it back, or name in {root / 'config.yaml'} where it lies now."
        )


def _matching(plan: Mapping[str, Any], layer: str | None) -> set[str]:
    """Return the targets that `layer` names, all without one."""
    if layer is None:
        return set(plan)
    found = {name for name in plan if name == layer or name.endswith(f".{layer}")}
    if not found:
        ends = sorted({name.rpartition(".")[2] for name in plan})
        near = difflib.get_close_matches(layer, [*ends, *plan], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise SettingsError(f"layer={layer!r}: is no target of this run.{hint} Targets end in {', '.join(ends)}.")
    return found


def _moved(before: Weights, after: Weights, name: str) -> float | None:
    """Compute ‖Δ‖/‖W‖ of a tensor; None where there is nothing to compare with."""
    if name not in before or before[name].shape != after[name].shape:
        return None
    old, new = before[name].double(), after[name].double()
    delta = float((new - old).norm())
    return delta / (float(old.norm()) or 1.0) if delta else 0.0


def _summary(
    targets: list[Moved], others: Mapping[str, float | None], rule: Literal["strict", "paper"], dtype: str
) -> Iterator[str]:
    """Yield the lines of the summary."""
    most, worst = max(targets, key=lambda t: t.moved), max(targets, key=lambda t: t.leak(rule))
    directions, free = sum((t.experts or 1) * min(t.shape) for t in targets), sum((t.experts or 1) * t.free for t in targets)
    above = sum(leaks(t, rule) for t in targets)
    changed = sum(size != 0 for size in others.values())
    if above:
        verdict = f"{above:,} of {len(targets):,} above it"
    else:
        verdict = "so nothing leaked" if any(t.moved for t in targets) else "nothing moved"
    yield (
        f"protected   {directions - free:,} of {counted(directions, 'directions')} of {counted(len(targets), 'targets')} "
        f"(osft_rule={rule})"
    )
    yield f"moved most  {most.moved:.2e} of ‖W‖: {most.name}"
    explained = f"rounding to {dtype} explains {worst.rounding:.1e}"
    yield f"worst leak  {worst.leak(rule):.1e} of ‖ΔW‖: {worst.name} ({explained}; {verdict})"
    anew = sum(target.anew for target in targets)
    if anew:
        yield (
            f"anew        singular vectors of {counted(anew, 'targets')}: the run's own are not in its osft/, these follow "
            "from the same weights"
        )
    yield f"elsewhere   {changed:,} of {len(others):,} other tensors changed"
