"""Base class of the backends, and what one says of itself."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from forge._errors import SettingsError

if TYPE_CHECKING:
    from forge._result import RunResult


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend can be asked for; None stands for all that forge has."""

    verbs: tuple[str, ...] | None = None
    """Training verbs, such as `sft`."""
    adapters: tuple[str, ...] | None = None
    """Values of the setting `adapter`; `none` is full training."""
    strategies: tuple[str, ...] | None = None
    """Values of the setting `strategy`."""
    devices: tuple[str, ...] | None = None
    """Kinds of devices, as the setting `device` names them."""


class Backend(ABC):
    """Base class of the backends: what executes the training that a verb's settings describe.

    A backend is made without arguments. Its module is imported when its name is chosen, also by processes that only read
    settings: what it needs is imported in its methods.
    """

    name: ClassVar[str]
    """Value of the setting `backend`."""
    Settings: ClassVar[type | None] = None
    """Frozen attrs class of settings that this backend alone has; its names, types and ranges are checked like forge's."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Modules that must be installed."""
    versions: ClassVar[Mapping[str, str]] = {}
    """Distribution → the versions that this backend is written for, as pip has them: `>=1.16,<2`."""
    install: ClassVar[str] = ""
    """Requirement for pip that installs them."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Setting that has no effect with this backend → why. Any other value than its default is refused."""
    has: ClassVar[Mapping[str, object]] = {}
    """Such a setting → another value than its default that names what the backend does."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the verbs, adapters, strategies and devices that this backend has."""

    @abstractmethod
    def execute_training(self, params: Mapping[str, object]) -> RunResult:
        """Run a training verb to its end.

        Args:
            params: `verb` and every setting by name, `backend` and the backend's own included. `data_path` and
                `eval_data_path` may be rows in memory (`forge_data.InMemoryRows`). What is no setting: `callbacks`, objects
                that watch the run; `origins`, setting → where its value came from; `tokenized`, setting → store of its rows,
                on a rank whose launcher read them.

        Returns:
            The result of the run, whose directory is `ckpt_output_dir`.

        Raises:
            SettingsError: the settings ask for what this backend does not have.

        """

    def rehearse(self, params: Mapping[str, object], *, target: str | None = None) -> str:  # noqa: ARG002 - for subclasses
        """Return what `execute_training` would do, as text; nothing is left behind.

        A backend that plans memory returns it as a `forge.DryRun`, whose `fits` is the exit status of `--dry-run`.

        Args:
            params: as `execute_training` takes them.
            target: devices that a memory plan is for.

        """
        raise SettingsError(f"backend={self.name} cannot say beforehand what it would do: leave --dry-run out.")

    def check(self, verb: str, s: Any) -> None:
        """Raise SettingsError for what this backend does not have.

        Args:
            verb: the training verb.
            s: its settings, composed.

        """
        able = self.capabilities()
        if able.verbs is not None and verb not in able.verbs:
            raise SettingsError(f"backend={self.name} has no {verb}; it has {', '.join(able.verbs)}. Choose another backend.")
        for name, value, known in (
            ("adapter", s.adapter.adapter, able.adapters),
            ("strategy", s.strategy.strategy, able.strategies),
        ):
            if known is not None and value not in known:
                raise SettingsError(
                    f"{name}={value} is not available with backend={self.name}; it has {', '.join(known)}. Choose one of them, "
                    "or another backend."
                )
        self._check_refused(s)
        self._check_device(s.device.device, able.devices)
        self._check_installed()

    def _check_refused(self, s: Any) -> None:
        from forge.settings._settings import flat_fields

        for group, field in flat_fields(type(s)):
            value = getattr(getattr(s, group), field.name)
            # What was chosen already was chosen by the backend, in the process that started this one.
            chosen = s.origins[field.name].startswith("chosen")
            usual = (field.default, self.has.get(field.name, field.default))
            if field.name in self.refused and value not in usual and not chosen:
                shown = ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else value
                raise SettingsError(
                    f"{field.name}={shown} has no effect with backend={self.name}: {self.refused[field.name]}. Leave it out, "
                    "or choose backend=forge."
                )

    def _check_device(self, asked: str, known: tuple[str, ...] | None) -> None:
        if known is None:
            return
        import forge_accel

        found = forge_accel.accelerator(asked).name
        if found not in known:
            raise SettingsError(
                f"backend={self.name} computes on {' or '.join(known)} alone, and the device here is {found}. Choose "
                "backend=forge, or a machine that has one."
            )

    def _check_installed(self) -> None:
        found: dict[str, str] = {}
        for distribution in self.versions:
            with contextlib.suppress(PackageNotFoundError):
                found[distribution] = version(distribution)
        missing = [module for module in self.requires if find_spec(module) is None]
        # A module may be there without its package: a namespace such as `instructlab` is that of several.
        missing = missing or [distribution for distribution in self.versions if distribution not in found]
        if missing:
            raise SettingsError(
                f"backend={self.name}: {' and '.join(missing)} is not installed: `pip install '{self.install}'`, or choose "
                "backend=forge."
            )
        for distribution, wanted in self.versions.items():
            if not within(found[distribution], wanted):
                raise SettingsError(
                    f"backend={self.name}: {distribution} {found[distribution]} is installed, and {wanted} is needed: "
                    f"`pip install '{self.install}'`, or choose backend=forge."
                )


def within(found: str, wanted: str) -> bool:
    """Return whether a version's release is in a range.

    >>> [within(found, ">=1.16,<2") for found in ("1.16.0", "1.9", "1.17rc1", "2.0.dev3")]
    [True, False, True, False]
    """
    clauses = (re.fullmatch(r"(>=|<)([\d.]+)", clause) for clause in wanted.split(","))
    return all(clause is not None and (_release(found) >= _release(clause[2])) is (clause[1] == ">=") for clause in clauses)


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version without the zeros at its end; 1.17rc1 is 1.17."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    parts = [int(each) for each in numbers[0].split(".")] if numbers else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)
