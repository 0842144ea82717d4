"""Classes of training_hub: algorithms that are given a backend, and the registry of both."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import forge
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.backends._backend import Backend
from forge.backends._names import get, names
from forge.hub._parameter import REQUIRED
from forge.hub._table import FUNCTIONS, REFUSED
from forge.hub._translate import OWN_LOOP, VERBS_OF, signature, translate
from forge.hub._values import unused_folder
from forge.settings._backends import FORGE, backend_class


class Algorithm(ABC):
    """Base class of the algorithms."""

    @abstractmethod
    def train(self, **kwargs: Any) -> Any:
        """Run the training."""

    @abstractmethod
    def get_required_params(self) -> dict[str, Any]:
        """Return the names of the required parameters, each with its type."""

    @abstractmethod
    def get_optional_params(self) -> dict[str, Any]:
        """Return the names of the other parameters, each with its type."""


class _TableAlgorithm(Algorithm):
    """Algorithm of which the table has the parameters.

    Args:
        backend: a backend or its name; forge's own by default.

    """

    function: ClassVar[str]

    def __init__(self, backend: Backend | str | None = None) -> None:
        if isinstance(backend, type) or not (backend is None or isinstance(backend, (str, Backend))):
            raise SettingsError(f"backend must be a backend or its name, not {backend!r}: give an object, such as CLASS().")
        self.backend = backend

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training.

        Takes the parameters of the function of the same name.

        Raises:
            SettingsError: a parameter is unknown or not available; the message says what to write.

        """
        given = bound(self.function, args, kwargs)
        name = self.backend.name if isinstance(self.backend, Backend) else self.backend
        if name is not None and given.get("backend") not in (None, name):
            raise SettingsError(
                f"backend={given['backend']!r} was given to an algorithm with the backend {name}: leave it out."
            )
        registered = name is None or name in OWN_LOOP or (name in names() and _is_of(self.backend, name))
        if registered:
            call = translate(self.function, **{**given, **({} if name is None else {"backend": name})})
            _tell(given)
            return getattr(forge, call.verb)(**call.settings, callbacks=call.callbacks)
        call = translate(self.function, **given)
        backend = self.backend if isinstance(self.backend, Backend) else get(str(name))
        settings = {setting: value for setting, value in call.settings.items() if setting != "backend"}
        return backend.execute_training({"verb": call.verb, **settings, "callbacks": call.callbacks})

    def get_required_params(self) -> dict[str, Any]:
        """Return the names of the required parameters, each with its type."""
        return {each.name: self._type(each.ours) for each in FUNCTIONS[self.function] if each.default is REQUIRED}

    def get_optional_params(self) -> dict[str, Any]:
        """Return the names of the other parameters, each with its type."""
        return {each.name: self._type(each.ours) for each in FUNCTIONS[self.function] if each.default is not REQUIRED}

    def _type(self, setting: str) -> Any:
        from forge.settings._settings import flat_fields

        verb = VERBS_OF.get(self.function, self.function)
        found = {field.name: field.type for _, field in flat_fields(getattr(forge, verb).task.settings)}
        return found.get(setting, object)


def _tell(given: dict[str, Any]) -> None:
    """Print once, on the first rank, what of a call has no effect."""
    said = unused_folder(given)
    if said is not None and os.environ.get("RANK", "0") == "0":
        Reporter(lambda _line, **_event: None).note(said)


def _is_of(backend: Backend | str | None, name: str) -> bool:
    """Return whether a backend is the one that its name stands for."""
    return not isinstance(backend, Backend) or type(backend) is backend_class(name)


class SFTAlgorithm(_TableAlgorithm):
    """Supervised fine-tuning."""

    function = "sft"


class OSFTAlgorithm(_TableAlgorithm):
    """Orthogonal subspace fine-tuning."""

    function = "osft"


class LoRASFTAlgorithm(_TableAlgorithm):
    """Supervised fine-tuning of an adapter."""

    function = "lora_sft"


class LoRAGRPOAlgorithm(_TableAlgorithm):
    """Reinforcement learning of an adapter."""

    function = "lora_grpo"


class GRPOAlgorithm(_TableAlgorithm):
    """Reinforcement learning of every weight."""

    function = "grpo"


class EmbeddingSFTAlgorithm(_TableAlgorithm):
    """Training of embeddings by labelled texts, or by pairs."""

    function = "embedding_sft"


_KINDS: tuple[type[_TableAlgorithm], ...] = (
    SFTAlgorithm,
    OSFTAlgorithm,
    LoRASFTAlgorithm,
    LoRAGRPOAlgorithm,
    GRPOAlgorithm,
    EmbeddingSFTAlgorithm,
)


class AlgorithmRegistry:
    """Table of the algorithms and of backends for them; those of forge are in it."""

    _algorithms: ClassVar[dict[str, type[Algorithm]]] = {each.function: each for each in _KINDS}
    _backends: ClassVar[dict[str, dict[str, type[Backend]]]] = {}

    @classmethod
    def register_algorithm(cls, name: str, algorithm_class: type[Algorithm]) -> None:
        """Add an algorithm."""
        cls._algorithms[name] = algorithm_class

    @classmethod
    def register_backend(cls, algorithm_name: str, backend_name: str, backend_class: type[Backend]) -> None:
        """Add a backend for an algorithm."""
        cls.get_algorithm(algorithm_name)
        cls._backends.setdefault(algorithm_name, {})[backend_name] = backend_class

    @classmethod
    def get_algorithm(cls, name: str) -> type[Algorithm]:
        """Return the class of an algorithm.

        Raises:
            SettingsError: there is none of this name.

        """
        if not isinstance(name, str):
            raise SettingsError(f"an algorithm is named by a text, not {name!r}.")
        if name in REFUSED:
            raise SettingsError(REFUSED[name])
        if name not in cls._algorithms:
            raise SettingsError(f"there is no algorithm {name!r}; known are {', '.join(cls._algorithms)}.")
        return cls._algorithms[name]

    @classmethod
    def get_backend(cls, algorithm_name: str, backend_name: str) -> type[Backend]:
        """Return the class of a backend for an algorithm.

        Raises:
            SettingsError: there is none of this name.

        """
        cls.get_algorithm(algorithm_name)
        own = cls._backends.get(algorithm_name, {})
        return own[backend_name] if backend_name in own else backend_class(FORGE if backend_name in OWN_LOOP else backend_name)

    @classmethod
    def list_algorithms(cls) -> list[str]:
        """Return the names of the algorithms."""
        return list(cls._algorithms)

    @classmethod
    def list_backends(cls, algorithm_name: str) -> list[str]:
        """Return the names of the backends that have an algorithm, forge's own first."""
        verb = VERBS_OF.get(algorithm_name, algorithm_name)
        if algorithm_name not in cls._algorithms:
            return []
        able = {name: get(name).capabilities().verbs for name in names()}
        return [
            *(name for name, verbs in able.items() if verbs is None or verb in verbs),
            *cls._backends.get(algorithm_name, {}),
        ]


def create_algorithm(algorithm_name: str, backend_name: str | None = None, **kwargs: Any) -> Algorithm:
    """Make an algorithm with a backend, by their names.

    Raises:
        SettingsError: there is no such algorithm or backend.

    """
    kind = AlgorithmRegistry.get_algorithm(algorithm_name)
    name = backend_name or AlgorithmRegistry.list_backends(algorithm_name)[0]
    given: Any = name if name in OWN_LOOP else AlgorithmRegistry.get_backend(algorithm_name, name)()
    return cast("Any", kind)(backend=given, **kwargs)


def bound(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Raises:
        SettingsError: there are too many, or one is given twice.

    """
    try:
        found = signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise SettingsError(f"{function}: {error}.") from None
    rest = found.pop("kwargs", {})
    return {**found, **rest}


def function_of(name: str) -> Any:
    """Make the function of an algorithm, with the signature that training_hub documents."""
    kinds = {each.function: each for each in _KINDS}

    def call(*args: Any, **kwargs: Any) -> Any:
        given = bound(name, args, kwargs)
        backend = given.pop("backend", None)
        registered = AlgorithmRegistry._backends.get(name, {}).get(backend) if isinstance(backend, str) else None
        return kinds[name](backend=registered() if registered else backend).train(**given)

    function: Any = call
    function.__name__ = function.__qualname__ = name
    function.__signature__ = signature(name)
    function.__doc__ = _DOCSTRING.format(name=name)
    return function


_DOCSTRING = """Run training_hub's `{name}` by forge: its parameters and defaults, forge's loop and run directory.

`docs/migrating/training-hub.md` says what each parameter is here. Settings of forge are taken beside them by their own names.

Returns:
    A `forge.RunResult`.

Raises:
    SettingsError: a parameter is unknown, missing or not available; the message says what to write.
    Exception: what the training verb raises.
"""
