"""A verb, a recipe and settings → the command of a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

from forge._errors import SettingsError
from forge.clusters._kep import AdapterConfig, FsdpConfig, LoraConfig, PrefixConfig, QLoraConfig, ZeroConfig
from forge.clusters._words import as_words, literal
from forge.settings._data_sets import said_of_each
from forge.settings._recipe import read_recipe, verb_of
from forge.settings._settings import flat_fields, required, resolve
from forge.verbs._registry import VERBS, task_of

_PLACES = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id")
"""Settings that the cluster decides for every job anew."""


@attrs.frozen(kw_only=True)
class ForgeConfig:
    """A run as a config-driven trainer of Kubeflow's SDK: label, entry point, `to_args()`.

    >>> config = ForgeConfig(
    ...     settings={"model_path": "org/model", "data_path": "rows.jsonl"}, peft_config=LoraConfig(lora_rank=8)
    ... )
    >>> config.entrypoint, config.to_args()
    (('forge', 'sft'), ['--adapter=lora', '--lora-r=8', '--model-path=org/model', '--data-path=rows.jsonl'])

    """

    framework: ClassVar[str] = "forge"
    """Value of the label trainer.kubeflow.org/framework."""

    recipe: str | Path | None = None
    """A YAML file of settings."""
    settings: Mapping[str, object] = attrs.field(factory=dict)
    """Settings by name, which win over the recipe."""
    verb: str = "sft"
    """Training verb; a recipe's own line `verb:` must agree with it."""
    peft_config: LoraConfig | QLoraConfig | AdapterConfig | PrefixConfig | None = None
    """What is trained beside a frozen model, in the words of KEP-2401."""
    sharding_config: FsdpConfig | ZeroConfig | None = None
    """How ranks share the model, in the words of KEP-2401."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.settings, Mapping):
            raise SettingsError(f"settings must be a mapping from names to values, not {self.settings!r}.")
        if self.verb not in VERBS:
            raise SettingsError(f"there is no verb {self.verb!r}. Verbs: {', '.join(VERBS)}.")
        for name, kinds in (
            ("peft_config", (LoraConfig, QLoraConfig, AdapterConfig, PrefixConfig)),
            ("sharding_config", (FsdpConfig, ZeroConfig)),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                known = ", ".join(kind.__name__ for kind in kinds)
                raise SettingsError(f"{name} must be one of {known}, not {value!r}.")

    @classmethod
    def of_recipe(cls, recipe: str | Path, verb: str | None = None, **settings: object) -> ForgeConfig:
        """Make the configuration of a recipe, for the verb that it names, or for this one."""
        return cls(recipe=recipe, verb=verb or verb_of(recipe) or "sft", settings=settings)

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """Command of the container: forge reads PET_* and starts the processes of its node itself."""
        return ("forge", self.verb)

    def to_settings(self) -> dict[str, object]:
        """Return all settings by name: the recipe's, those of the configurations, then `settings`.

        Raises:
            RecipeError: the recipe cannot be read.
            SettingsError: two of them set one thing, or a setting says what the cluster decides.

        """
        given: dict[str, object] = {} if self.recipe is None else read_recipe(self.recipe, self.verb)
        for name in ("peft_config", "sharding_config"):
            config = getattr(self, name)
            for setting, value in ({} if config is None else config.to_settings()).items():
                if given.get(setting, value) != value or self.settings.get(setting, value) != value:
                    raise SettingsError(f"{name} sets {setting}={value!r}, which is set otherwise too: say it once.")
                given[setting] = value
        found = {name: value for name, value in {**given, **self.settings}.items() if value is not None}
        for name in _PLACES:
            if name in found:
                raise SettingsError(f"{name}={found[name]!r} is what the cluster says to each node: leave it out.")
        return found

    def checked(self, **given: object) -> Any:
        """Return the composed settings of the verb, with some given beside these.

        Raises:
            SettingsError: all that is wrong with them.

        """
        task = task_of(self.verb)
        origin = "argument" if self.recipe is None else f"recipe {self.recipe}"
        return resolve(task.settings, (origin, self.to_settings()), ("argument", given))

    def open_names(self, values: Mapping[str, object]) -> list[str]:
        """List the settings that a run must have and `values` leave open."""
        return [name for name in required(task_of(self.verb).settings, values) if name not in values]

    def to_args(self) -> list[str]:
        """Return the words that follow the entry point, escaped as Kubernetes reads arguments."""
        values = self.to_settings()
        # What is still open is the business of whoever renders: a model that an initializer fetches, say.
        self.checked(**dict.fromkeys(self.open_names(values), "?"))
        return [literal(word) for word in self.words(values)]

    def words(self, values: Mapping[str, object]) -> list[str]:
        """Write settings as flags. Raises SettingsError for what would be read otherwise."""
        for _, field in flat_fields(task_of(self.verb).settings):
            value, read = values.get(field.name), field.metadata.get("words")
            if read is None or value is None:
                continue
            words = [value] if isinstance(value, str) else as_words({field.name: value})[1:]
            found = read(words)
            if isinstance(value, (list, tuple)) and any(isinstance(each, Mapping) for each in value):
                same = said_of_each(found) == said_of_each(value)
            else:
                same = found in (dict(value), tuple(words)) if isinstance(value, Mapping) else not isinstance(found, Mapping)
            if not same:
                raise SettingsError(
                    f"{field.name}={value!r}: a command line would read {' '.join(words)} otherwise. Name it otherwise."
                )
        return as_words(values)
