"""Run in a directory, and the settings now → whether the run can be resumed with them.

Settings of which another value would have changed the steps so far must stay. Those that decide only how the work is divided,
shown or kept may change at every start.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forge_algos
import forge_dist
import forge_packing
from forge._errors import ForgeError, SettingsError
from forge._turn_end import TURN_END
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.run._stores import STORES
from forge.saving._damage import has_result
from forge.saving._directories import last_export, run_values
from forge.settings._origin import origin_note
from forge.settings._recipe import as_values, left_open, origins_in, verb_of
from forge.settings._settings import RunSettings
from forge.tasks.items._items import Items

DIVISION = frozenset(
    {
        *(
            "max_tokens_per_gpu",
            "strategy",
            "shard_size",
            "tp_size",
            "cp_size",
            "ep_size",
            "reshard_after_forward",
            "cpu_offload",
            "activation_checkpointing",
            "activation_offloading",
        ),
        *("nproc_per_node", "nnodes", "node_rank", "rdzv_id", "rdzv_endpoint", "master_addr", "master_port"),
        *(
            "max_restarts",
            "connect_seconds",
            "stall_timeout",
            "device",
            "attention",
            "packing",
            "compile",
            "kernels",
            "num_proc",
            "resume",
        ),
    }
)
"""Settings of how a step is divided: its samples and its loss are the same."""

_MODELS = ("reference_path", "teacher_path", "teacher_logprobs", "reward_model_path")
"""Settings of models beside the one that trains; run.json has those that are given."""

_FREE = DIVISION | frozenset(
    {
        # Paths: the content is compared by fingerprint.
        *("model_path", *_MODELS),
        *("data_path", "eval_data_path", "preprocess", "ckpt_output_dir", "osft_cache"),
        # What is saved, measured, shown and refused.
        *("save_samples", "save_dtype", "checkpoint_at_epoch", "full_state_every_steps", "full_state_every_minutes"),
        *("max_failed_saves", "emergency_dir", "accelerate_full_state_at_epoch", "keep_last_n", "keep_full_state"),
        *("keep_last_checkpoint_only", "async_save"),
        *(
            "checkpoint_storage",
            "trackers",
            "wandb_project",
            "wandb_entity",
            "wandb_run_name",
            "mlflow_tracking_uri",
            "mlflow_experiment_name",
        ),
        *("mlflow_run_name", "tensorboard_log_dir"),
        *(
            "eval_every_steps",
            "eval_at_epoch",
            "keep_best",
            "metric_for_best",
            "early_stopping_patience",
            "kl_base",
            "stop_at_kl",
            "logging_steps",
            "quiet",
            "lint",
            "on_nan",
        ),
        *("eval_prompts", "eval_max_new_tokens"),
    }
)
ORDER = "order"
"""Entry of run.json: the fingerprint of the order of samples, by which a plan that was lost is known again."""

_SHORT_SECONDS = 1.0
"""Seconds that a start waits for its models' digests before it goes on without them."""

_LENGTH = ("num_epochs", "max_steps", "max_tokens")

ADDED = {
    "max_samples": None,
    "system_prompt": None,
    "train_on_turn_end": "turn",
    "shuffle": True,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "warmup_ratio": 0.0,
    "router_aux_loss_coef": None,
    "adapter_path": None,
    "qat": None,
    "oft_block_size": 32,
    "vera_rank": 256,
    "fourier_n_frequency": 1000,
    "fourier_scaling": 150.0,
    "c3a_block_size": 256,
    "f_divergence_alpha": 0.5,
    "discopop_tau": 0.05,
    "ld_alpha": None,
    "wpo": False,
    "reference": "initial",
    "reference_sync_steps": 512,
    "reference_mixup": 0.6,
    "reward_clip_range": None,
    "loss_type": "kto",
    "loss": "jsd",
    **dict.fromkeys(("matched_weight", "unmatched_weight", "sample_temperature")),
    "teacher_rest": "class",
    "on_policy": 0.0,
    "max_new_tokens": 256,
    "top_p": 1.0,
    "top_k": 0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "top_entropy_quantile": 1.0,
    "clip_cov_ub": 5.0,
    **dict.fromkeys(("clip_cov_ratio", "kl_cov_ratio"), 2e-4),
    **dict.fromkeys(("clip_cov_lb", "kl_cov_coef", "sapo_temperature_pos"), 1.0),
    **dict.fromkeys(("importance_sampling_level", "off_policy_mask_threshold", "loss_reduction", "dro_beta", "dual_clip")),
    "kl_target": None,
    "kl_horizon": 10_000,
    "multi_objective_aggregation": "sum_then_normalize",
    "sapo_temperature_neg": 1.05,
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_neg"), 2.0),
    **dict.fromkeys(("vespo_lambda_pos", "vespo_k_neg"), 3.0),
    "normalize_advantages": False,
    "baseline": "mean",
    "whiten": False,
    "kl_in_reward": False,
    "cpo_alpha": 0.0,
    "unfrozen_parameters": None,
    "apollo_rank": None,
    "apollo_update_interval": 200,
    "apollo_scale": None,
    "freeze_vision_tower": True,
    "freeze_audio_tower": True,
    "freeze_multi_modal_projector": True,
    "freeze_language_model": False,
}
"""Setting that earlier versions did not know → what their runs had, with which their full states are resumed."""
_SAMPLING = ("max_new_tokens", "top_p", "top_k")
"""Of these what is new in `forge distill` alone: full states of other verbs have an entry whatever the value."""


def is_finished(path: Path, s: RunSettings, verb: str) -> bool:
    """Return whether the run in `path` is finished, and of this verb and these settings."""
    try:
        done = s.checkpoints.resume in ("auto", "never") and has_result(path)
        return done and verb_of(path / "config.yaml") in (None, verb) and not other_request(path, s)
    except (ForgeError, OSError, ValueError):  # its config.yaml, which RunDirectory names
        return False


def other_request(path: Path, s: RunSettings) -> list[str]:
    """Return in words the settings that ask for another run than that in `path`."""
    before, now = _meant(run_values(path), s), _meant(as_json(as_values(s)), s)
    was_open = left_open((path / "config.yaml").read_text(encoding="utf-8"))
    is_open = {
        name for name, origin in s.origins.items() if origin == "default" or origin.startswith(("chosen", "environment"))
    }
    is_open.discard("osft_directions")
    for values in (before, now):
        # A path and its URL are one place.
        if isinstance(url := values.get("checkpoint_storage"), str):
            values["checkpoint_storage"] = url.removeprefix("file://")
    added = ADDED.keys() - before.keys()  # an earlier version's run

    def same(name: str) -> bool:
        if name in added:
            return now[name] == ADDED[name]
        return (name in is_open and name in was_open) or before.get(name, now[name]) == now[name]

    def change(name: str) -> str:
        is_now = "left out" if name in is_open and now[name] is None else _word(now[name])
        return f"`{name}`: {_word(before.get(name, ADDED.get(name)))} → {is_now}"

    return [change(name) for name in now if name not in DIVISION | {"ckpt_output_dir", "quiet"} and not same(name)]


def _meant(values: dict[str, Any], s: RunSettings) -> dict[str, Any]:
    """Return settings with what OSFT protects where it was left open.

    An earlier version wrote it out in every run.
    """
    usual = s.adapter.usual_directions(values.get("osft_calibration_path"), values.get("osft_rank") or "uniform")
    return {**values, "osft_directions": values.get("osft_directions") or usual}


def compare_settings(path: Path, s: RunSettings, *, open_left: bool = False) -> list[str]:
    """Return the settings that changed since the run in `path` began, in words.

    With `open_left` settings that are still to be chosen are not compared yet.

    Raises:
        SettingsError: a setting changed that must stay.

    """
    before, now = _meant({**ADDED, **run_values(path)}, s), _meant(as_json(as_values(s)), s)
    changed = {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}
    # What others were chosen for comes first, and what follows from others last: its word lets the run go on.
    order = {"adapter_path": -2, "weights": -1, "osft_directions": 1}
    for name, (was, is_now) in sorted(changed.items(), key=lambda item: order.get(item[0], 0)):
        if name == "adapter_path":
            if None not in (was, is_now):
                continue  # a path, whose content is compared with the run's copy
        elif name in _FREE or (open_left and is_now in (None, "auto")):
            continue
        if name in _LENGTH:
            if not s.optimizer.needs_length:
                continue
            share = s.optimizer.lr_scheduler in forge_algos.SCHEDULES_WITHOUT_LENGTH
            by = f"warmup_ratio={s.optimizer.warmup_ratio:g}" if share else f"lr_scheduler={s.optimizer.lr_scheduler}"
            why = f"its learning rates were those of {by} over that length"
        else:
            why = "its steps so far were made with the former"
        before_it = f"no {name}" if was is None else f"{name}={_word(was)}"
        remedy = f"Leave {name} out" if was is None else f"Give {before_it}"
        raise SettingsError(
            f"ckpt_output_dir {path}: holds a run with {before_it}, and now `{name}` is {_word(is_now)}"
            f"{origin_note(s.origins[name])}; {why}. {_remedy(path, remedy)}"
        )
    # What is left open is chosen later, or has no value of its own.
    shown = {name: values for name, values in changed.items() if values[1] not in (None, "auto")}
    return [f"{name}: {_word(was)} → {_word(is_now)}" for name, (was, is_now) in shown.items()]


def _remedy(path: Path, to_resume: str) -> str:
    """Say how to go on: from the model of a run that is finished, else by what resumes it."""
    if not has_result(path):
        return f"{to_resume} to resume it, or give another ckpt_output_dir to begin anew."
    try:
        export = last_export(str(path))
    except SettingsError:  # somebody removed it
        return "That run is finished: give another ckpt_output_dir."
    setting = "adapter_path" if (Path(export) / "adapter_config.json").is_file() else "model_path"
    return f"That run is finished: give another ckpt_output_dir to begin anew, and {setting}={export} to go on from its model."


def former_choice(s: RunSettings, path: Path | None, name: str) -> tuple[Any, str] | None:
    """Return a setting of the resumed run and the reason for it; None where there is none.

    Where it is left open, it stays what the run began with: the same micro-batches and products give the same bits.

    Args:
        s: the settings now.
        path: directory of the run; None for a new one, which may begin from a full state of another.
        name: of the setting.

    """
    if (path := former_run(s, path)) is None:
        return None
    value = run_values(path).get(name)
    if value is None:
        return None
    origin = origins_in((path / "config.yaml").read_text(encoding="utf-8")).get(name, "")
    return value, origin.removeprefix("chosen: ") if origin.startswith("chosen: ") else "what the run had before"


def former_run(s: RunSettings, path: Path | None) -> Path | None:
    """Return the run that goes on: `path`, or that of the full state in `resume`."""
    if path is not None or s.checkpoints.resume in ("auto", "never"):
        return path
    folder = Path(s.checkpoints.resume).expanduser().parent.parent
    return folder if (folder / "config.yaml").is_file() else None


def former_tokens(s: RunSettings, path: Path | None) -> tuple[int, str] | None:
    """Return the max_tokens_per_gpu of the resumed run, and the reason for it.

    Arguments are as of `former_choice`.
    """
    tokens, why = former_choice(s, path, "max_tokens_per_gpu") or (None, "")
    return (tokens, why) if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else None


def _word(value: object) -> str:
    """Write a setting's value for a message."""
    return value if isinstance(value, str) else json.dumps(value)


def compare_order(path: Path, plan: forge_packing.BatchPlan, note: Callable[[str], None]) -> None:
    """Compare the plan with the run's: it must take the samples in the same order.

    A plan that was lost or damaged is made again, where run.json has the fingerprint of the order.

    Raises:
        SettingsError: it takes them in another one, or nothing proves that it does not.

    """
    recorded = json.loads((path / "run.json").read_text(encoding="utf-8")).get(ORDER)  # an earlier version's has none
    fault = None
    try:
        was = forge_packing.BatchPlan.load(path / "plan" / "plan.npz").order_fingerprint
    except forge_packing.PackingError as error:
        was, fault = recorded, error
    if was is None:
        raise SettingsError(
            f"ckpt_output_dir {path}: its plan/plan.npz cannot be read ({fault}), and its run.json does not hold the "
            "fingerprint that would prove another plan equal. Put it back, or give another ckpt_output_dir."
        )
    if fault is not None and was == plan.order_fingerprint:
        note(f"WARNING: {fault}. It was made again: it takes the samples in the run's order")
    if was != plan.order_fingerprint:
        raise SettingsError(
            f"ckpt_output_dir {path}: its run takes the samples in another order than would be planned now. Resume it with "
            "the shares of data_path, and the versions of forge-packing and numpy, that it was made with, or give another "
            "ckpt_output_dir."
        )


class Identity:
    """Number of a run, its verb and its models' digests, which threads read meanwhile.

    That is beside what comes before training. A new run's run.json is written, and the models of a resumed run are compared,
    once the digests are known: by `settle` at the latest, before the first thing that a run leaves or goes on from.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        """As run.json has it; of a model whose files are still being read the path."""
        self._paths: dict[str, str] = {}
        self._reading: forge_dist.ModelIdentities | None = None
        self._record: tuple[Path, dict[str, Any]] | None = None
        self._resumed = False

    def begin(self, verb: str, models: Mapping[str, str], *, read: bool) -> None:
        """Begin to read the models: name → path.

        Small ones are known at once; without `read` the paths stay. A dry run writes nothing that these name, and to read them
        takes minutes where a model has 140 GB.
        """
        self._paths = dict(models)
        self.known = {"run": _number(), "verb": verb, **models}
        if read:
            self._reading = forge_dist.ModelIdentities(models)
            self._take(self._reading.wait(_SHORT_SECONDS))

    def resume(self, path: Path, *, wait: bool) -> None:
        """Take the number of the run in `path`.

        Raises:
            SettingsError: it is of another verb or model; of models those are compared that are known.

        """
        if wait:
            self._wait()
        self.known = compare_model(path, self.known, self._paths, digests=self._reading is None)
        self._resumed = True

    def replace(self) -> None:
        """Give the run a new number: it takes the place of the one in the directory."""
        self.known = {**self.known, "run": _number()}

    def refuse_other_model(self, path: Path) -> None:
        """Wait, and raise SettingsError for another model than that of a run that is resumed."""
        if self._resumed and self._reading is not None:
            self.resume(path, wait=True)

    def record(self, file: Path, about: Mapping[str, Any]) -> None:
        """Write run.json of a new run, with `about`, now or once the digests are known."""
        self._record = file, dict(about)
        self._write()

    def settle(self, out: RunDirectory | NoDirectory) -> dict[str, str]:
        """Wait for the digests, and compare or write them. Raises SettingsError for another model."""
        self._wait()
        if out.resuming:
            self.known = compare_model(out.path, self.known, self._paths)
        self._write()
        return self.known

    def _wait(self) -> None:
        while self._reading is not None:
            self._take(self._reading.wait(_SHORT_SECONDS))
            forge_dist.beat()

    def _take(self, digests: Mapping[str, str] | None) -> None:
        if digests is not None:
            self.known, self._reading = {**self.known, **digests}, None

    def _write(self) -> None:
        if self._record is not None and self._reading is None:
            file, about = self._record
            file.write_text(json.dumps({**self.known, **about}) + "\n", encoding="utf-8")
            self._record = None


def _number() -> str:
    return secrets.token_hex(8)


def compare_model(path: Path, identity: Mapping[str, str], paths: Mapping[str, str], *, digests: bool = True) -> dict[str, str]:
    """Compare the identity of the run in `path`, and return it.

    Without `digests` of the models only their names are compared; `paths` are where they lie now, for messages.

    Raises:
        SettingsError: it is a run of another verb or model.

    """
    try:
        known = {name: str(value) for name, value in json.loads((path / "run.json").read_text(encoding="utf-8")).items()}
        run, verb = known["run"], known["verb"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise SettingsError(
            f"ckpt_output_dir {path}: its run.json, which identifies the run and its model, cannot be read ({why}). Put it "
            "back, or give another ckpt_output_dir."
        ) from error
    if verb != identity["verb"]:
        raise SettingsError(
            f"ckpt_output_dir {path}: holds a run of forge {verb}, and this is forge {identity['verb']}. Give another "
            "ckpt_output_dir."
        )
    for name in sorted((identity.keys() | known.keys()) - {"run", "verb", "qat", STORES, ORDER, TURN_END}):
        if name == "base_model" and not (name in known and name in identity):
            continue  # other new tokens than before: the comparison of settings says so
        if name in _MODELS and not (name in known and name in identity):
            gone = [each for each in _MODELS if each in known and each not in identity]
            raise _other_models(path, gone, {each: paths[each] for each in _MODELS if each in identity and each not in known})
        if known.get(name) != identity.get(name) and (digests or not (name in known and name in identity)):
            held = "its config.json or its weights" if name != "teacher_logprobs" else "what `forge teach` wrote there"
            raise SettingsError(
                f"ckpt_output_dir {path}: the model in {'model_path' if name == 'model' else name} is not the one that its run "
                f"began with: {held} changed. Put it back, or give another ckpt_output_dir."
            )
    return {**identity, "run": run}


def _other_models(path: Path, gone: Sequence[str], paths: Mapping[str, str]) -> SettingsError:
    """Return the error of a run that began with the models of `gone`, and now has `paths`."""
    values = run_values(path)
    was = [f"{name}={values.get(name)}" for name in gone]
    remedy = f"Give {' and '.join(was)}" if was else f"Leave {' and '.join(paths)} out"
    return SettingsError(
        f"ckpt_output_dir {path}: holds a run with {' and '.join(was or [f'no {name}' for name in paths])}, and now "
        f"{' and '.join([f'{name}={now}' for name, now in paths.items()] or [f'no {name}' for name in gone])}; its steps so "
        f"far were made with the former. {_remedy(path, remedy)}"
    )


def must_match(
    s: RunSettings, train: Items, plan: forge_packing.BatchPlan, identity: Mapping[str, str], adaptation: str
) -> dict[str, Any]:
    """Return what a full state must match to be restored, as JSON.

    That is the run, the data, their order, the model, the adaptation, and the settings that must stay.
    """
    # Full states are of one backend alone, and know an adapter's content as their adaptation.
    free = {*_FREE, *_LENGTH, "backend", "adapter_path"}
    values = as_values(s)
    new = {name: value for name, value in ADDED.items() if name not in _SAMPLING or "on_policy" in values}
    past = {name: value for name, value in values.items() if name not in free and (name, value) not in new.items()}
    length = {"steps": plan.num_steps} if s.optimizer.needs_length else {}
    return {
        "data": train.store.fingerprint,
        "order": plan.order_fingerprint,
        **identity,
        **({"adaptation": adaptation} if adaptation else {}),
        **_meant(as_json(past), s),
        **length,
    }


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they come back from a JSON file."""
    return json.loads(json.dumps(values))
