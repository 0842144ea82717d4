"""Backend base for libraries that start processes of their own on tokenized rows."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import shutil
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import forge_accel
import forge_data
import forge_dist
from forge._errors import BackendError, SettingsError
from forge._progress import Reporter
from forge._result import RunResult, read_result
from forge._turn_end import former_turn_end, setting_of_end, write_turn_end
from forge.backends._backend import Backend
from forge.backends._end import write_finished
from forge.backends._request import Request, read_request
from forge.run._choices import absolute_paths
from forge.run._early_checks import check_names
from forge.run._prepare import Prepared, open_prepared, prepare, with_chosen
from forge.run._rows import with_descriptions
from forge.run._run_directory import RunDirectory
from forge.run._starting_model import Start
from forge.saving._hashes import hash_export, record_hashes
from forge.settings._recipe import as_recipe, as_values
from forge.tasks._system_message import write_system_prompt
from forge.trackers._watchers import Watchers

FOLDER = "backend"
"""Folder of the run directory in which the library finds its rows and writes its own files."""
ROWS = "data.jsonl"
_POLL_SECONDS = 0.5

_NODE = "it starts the processes of one node"
_EVAL = "forge reads its steps alone; `forge eval` and `forge compare` measure afterwards"
_STATES = "a run that was stopped begins anew"
REFUSED_BY_ALL: dict[str, str] = {
    **dict.fromkeys(
        ("loss", "label_smoothing", "z_loss", "neftune_alpha", "normalize"), "its loss is the mean over a step's tokens"
    ),
    **dict.fromkeys(("optimizer", "momentum", "apollo_rank", "apollo_update_interval", "apollo_scale"), "it has AdamW alone"),
    "loraplus_lr_ratio": "it trains no LoRA",
    "unfrozen_parameters": "it trains every weight",
    **dict.fromkeys(("freeze_vision_tower", "freeze_audio_tower"), "its rows are text"),
    **dict.fromkeys(("freeze_multi_modal_projector", "freeze_language_model"), "its rows are text"),
    "max_grad_norm": "it clips at 1",
    "on_nan": "it looks at no loss",
    "packing": "it packs as it does",
    "shuffle": "it draws rows in an order of its own",
    **dict.fromkeys(("attention", "compile", "kernels"), "it chooses its own"),
    **dict.fromkeys(("moe_aux_loss", "router_aux_loss_coef"), "it adds what transformers adds"),
    **dict.fromkeys(
        ("shard_size", "gather_dtype", "reshard_after_forward", "cpu_offload", "activation_checkpointing"),
        "it divides the model in its own way",
    ),
    "activation_offloading": "it divides the model in its own way",
    "weights": "it trains the weights that it loads",
    "qat": "it computes with the weights that it trains",
    **dict.fromkeys(("tp_size", "cp_size", "ep_size"), "it divides the model in its own way"),
    **dict.fromkeys(("nnodes", "node_rank", "rdzv_id", "rdzv_endpoint", "master_addr", "master_port"), _NODE),
    **dict.fromkeys(("max_restarts", "connect_seconds"), _NODE),
    "stall_timeout": "its processes are not watched",
    **dict.fromkeys(("eval_data_path", "validation_split", "eval_every_steps", "keep_best", "metric_for_best"), _EVAL),
    **dict.fromkeys(("early_stopping_patience", "eval_prompts", "eval_max_new_tokens", "kl_base", "stop_at_kl"), _EVAL),
    "eval_at_epoch": _EVAL,
    **dict.fromkeys(("full_state_every_steps", "full_state_every_minutes", "accelerate_full_state_at_epoch"), _STATES),
    **dict.fromkeys(("max_failed_saves", "emergency_dir"), _STATES),
    **dict.fromkeys(("keep_last_n", "keep_full_state", "async_save", "checkpoint_storage"), _STATES),
}
"""Setting that no such library honours → why."""


class OwnLoopBackend(Backend):
    """Base of the backends that hand rows and arguments to `run_training` of a library."""

    module: ClassVar[str]
    """Module with `run_training`."""
    types: ClassVar[str]
    """Module with `TrainingArgs` and `TorchrunArgs`."""
    says: ClassVar[str]
    """Sentence at the start of the log on what is not promised."""

    @abstractmethod
    def training_args(self, classes: Any, prepared: Prepared, model_path: str, folder: Path) -> dict[str, Any]:
        """Return the arguments of the library's `TrainingArgs`.

        Args:
            classes: the library's module `types`.
            prepared: settings with every choice made, rows and plan.
            model_path: of the model that the run starts from.
            folder: for the library's files; it holds the rows.

        """

    @abstractmethod
    def logs(self, folder: Path) -> Path:
        """Return the file to which the library's first rank writes its steps."""

    @abstractmethod
    def line(self, logged: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a line of metrics.jsonl for a logged one; None where it is of no step."""

    def tidy(self, directory: Path) -> None:
        """Remove from an export what plain transformers does not know."""

    def torchrun_args(self, s: Any) -> dict[str, Any]:
        """Return the arguments of the library's `TorchrunArgs`."""
        number = "gpu" if s.launch.nproc_per_node in ("auto", "gpu") else self._shards(s)
        return {"nnodes": 1, "node_rank": 0, "nproc_per_node": number, "rdzv_id": 0}

    def execute_training(self, params: Mapping[str, object]) -> RunResult:
        """Run a training verb to its end."""
        task, s, rows, callbacks = request = self._request(params)
        path = s.checkpoints.ckpt_output_dir
        with RunDirectory(path, resume=s.checkpoints.resume) as out:
            report = Reporter(out.log, every=s.report.logging_steps, brief=s.report.quiet)
            with Watchers(callbacks, report.note) as watchers:
                machine = forge_accel.accelerator(s.device.device)
                report.note(self.says)
                shards = self._shards(s)
                report.note(f"device: {machine.device.reason}", event="machine", ranks=shards, device=machine.name)
                found = prepare(task, s, rows, out, machine, ("ddp" if shards > 1 else "single", shards), report, target=None)
                if found["finished"]:
                    return watchers.end(read_result(out.path))
                prepared, start = self._opened(request, found, machine, shards)
                s = prepared.settings
                out.check(None)
                folder = out.path / FOLDER
                shutil.rmtree(folder, ignore_errors=True)
                # Both classes check their values, before anything of the run is written.
                given, arguments = self._arguments(prepared, start.path, folder)
                out.publish(as_recipe(s, task.name))
                out.rewind(0, 0)
                prepared = open_prepared(task, s, machine, out.path, shards)
                write_rows(prepared.train, folder / ROWS)
                shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
                report.note(f"step 1, by {self.module}.run_training: {shown}", event="started")
                watchers.begin(out.place("trackers"), found["identity"]["run"], s.tracking, as_values(s), machine)
                out.watch = watchers.record
                out.began = True
                return watchers.end(self._trained(prepared, arguments, out, report))

    def rehearse(self, params: Mapping[str, object], *, target: str | None = None) -> str:
        """Check, tokenize and plan, leave nothing behind, and list the arguments."""
        if target is not None:
            raise SettingsError(f"--for is not available with backend={self.name}, whose memory is not planned: leave it out.")
        task, s, rows, _ = request = self._request(params)
        with RunDirectory(s.checkpoints.ckpt_output_dir, resume=s.checkpoints.resume) as out:
            report = Reporter(out.log, every=s.report.logging_steps, brief=s.report.quiet)
            machine, shards = forge_accel.accelerator(s.device.device), self._shards(s)
            found = prepare(task, s, rows, out, machine, ("ddp" if shards > 1 else "single", shards), report, target=None)
            if found["finished"]:
                return f"{out.path} holds this very run, finished: the same command would return its result and train nothing."
            prepared, start = self._opened(request, found, machine, shards)
            given, _ = self._arguments(prepared, start.path, out.path / FOLDER)
        lines = [f"  {name}={value!r}" for name, value in {**self.torchrun_args(s), **given}.items()]
        head = f"forge {task.name} would write {s.checkpoints.ckpt_output_dir}, by {self.module}.run_training:"
        return "\n".join([head, f"  data: {prepared.train}", *lines, "Nothing was trained, and nothing is left behind."])

    def _request(self, params: Mapping[str, object]) -> Request:
        """Read the parameters; refuse a process that torchrun started."""
        request = read_request(self, params)
        where = forge_dist.topology(request.settings.launch, devices=1)
        if where.role == "worker":
            raise SettingsError(f"backend={self.name} starts torchrun itself: call it once, without a launcher.")
        if where.max_nodes > 1:
            # Each node would train alone, to the same directory.
            raise SettingsError(
                f"backend={self.name} trains on one node, and {where.origins['nnodes']} says that there are {where.max_nodes}: "
                "start it on one, or choose backend=forge."
            )
        s = absolute_paths(request.task, request.settings)
        check_names(request.task, s, request.rows)
        return request._replace(settings=s)

    def _arguments(self, prepared: Prepared, model_path: str, folder: Path) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """Return the arguments by name, and both argument classes made of them.

        Raises:
            SettingsError: the library refuses a value, or is of a version that no longer knows an argument.

        """
        classes = importlib.import_module(self.types)
        given = self.training_args(classes, prepared, model_path, folder)
        try:
            made = classes.TorchrunArgs(**self.torchrun_args(prepared.settings)), classes.TrainingArgs(**given)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"backend={self.name} does not take its arguments: {error}") from error
        # Classes of pydantic pass over a name that they do not know.
        lost = [name for name in given if not hasattr(made[1], name)]
        if lost:
            raise SettingsError(
                f"backend={self.name}: the library that is installed has no {', '.join(lost)}, so that what it stands for "
                f"would have no effect: `pip install '{self.install}'` of the version on the page about backends."
            )
        return given, made

    def _shards(self, s: Any) -> int:
        """Return the processes of this node: the setting's, or what a cluster says."""
        return forge_dist.topology(s.launch, devices=max(1, forge_accel.device_count(s.device.device))).nproc_per_node

    def _opened(
        self, request: Request, found: dict[str, Any], machine: forge_accel.Accelerator, shards: int
    ) -> tuple[Prepared, Start]:
        """Open what was prepared; check that the rows hold nothing that the library does not read."""
        s = with_chosen(with_descriptions(request.settings, found["rows"]), found["chosen"])
        prepared = open_prepared(request.task, s, machine, Path(found["root"]), shards)
        items = prepared.train
        if items.weights is not None:
            raise SettingsError(
                f"data_path gives weights, and backend={self.name} takes each row once an epoch: list the paths."
            )
        for index, example in enumerate(items.store):
            if example.weights is not None:
                raise SettingsError(
                    f"{items.store.source(index)}: has weights of tokens, which backend={self.name} does not read: choose "
                    "backend=forge."
                )
        return prepared, Start(**found["start"])

    def _trained(self, prepared: Prepared, arguments: tuple[Any, Any], out: RunDirectory, report: Reporter) -> RunResult:
        """Call the library, record its steps, and take its model over."""
        folder, began = out.path / FOLDER, time.perf_counter()
        follower = Follower(self, self.logs(folder), out)
        # What the library prints goes where forge's own messages go: stdout is for the result.
        try:
            with contextlib.redirect_stdout(sys.stderr), follower:
                importlib.import_module(self.module).run_training(*arguments)
        except Exception as error:
            logs = ", ".join(sorted(each.name for each in folder.glob("*.log"))) or "none"
            raise BackendError(
                f"backend={self.name} failed: {error} What its processes wrote is in {folder}: {logs}. The same "
                "command begins anew."
            ) from error
        last = follower.last
        if last is None:
            raise BackendError(f"backend={self.name} ended without a step in {self.logs(folder)}: its own log lies beside it.")
        directory = self._take_over(prepared, folder, out, int(last["samples"]), report)
        steps, samples, loss = int(last["step"]), int(last["samples"]), float(last["loss"])
        return write_finished(out, directory, report, steps=steps, samples=samples, loss=loss, began=began, unit="samples")

    def _take_over(self, prepared: Prepared, folder: Path, out: RunDirectory, samples: int, report: Reporter) -> Path:
        """Move the library's exports to hf_format/, and load the last one back."""
        s, target = prepared.settings, out.path / "hf_format"
        found = sorted(exports(folder / "hf_format"), key=lambda each: each[0])
        if not found:
            raise BackendError(f"backend={self.name} ended without an export in {folder / 'hf_format'}.")
        every = (
            s.checkpoints.save_samples or s.checkpoints.checkpoint_at_epoch
        ) and not s.checkpoints.keep_last_checkpoint_only
        target.mkdir(exist_ok=True)
        tokenizer = forge_data.load_tokenizer(s.model.model_path)
        tokenizer.chat_template = prepared.train.store.chat_template
        directory, end = target / f"samples_{samples}", None
        for count, each in found if every else found[-1:]:
            directory = target / f"samples_{samples if count == math.inf else int(count)}"
            self.tidy(each)
            end = write_turn_end(each, tokenizer, former_turn_end(out.path)) or end
            if (text := getattr(s.data, "system_prompt", None)) is not None:
                write_system_prompt(each, text)
            each.rename(directory)
        if end is not None:
            report.note(f"{setting_of_end(s)}: {end} ends a turn, and generation_config.json of an export names it")
        tokenizer.save_pretrained(directory)
        device = forge_accel.accelerator("cpu").device.value
        forge_dist.load_trained(str(directory), dtype=forge_accel.float32, device=device)
        for each in sorted(target.glob("samples_*")):
            record_hashes(out.path, each.name, hash_export(each))
        text = f"{directory}: loads; it was not compared with the model in memory, which another process held"
        report.note(text, event="exported", export=directory.name, files=hash_export(directory))
        return directory


class Follower:
    """Thread that records a library's steps while it trains; a context manager.

    Args:
        backend: which reads the logged lines.
        file: that the library writes, once it does.
        out: the run directory.

    """

    def __init__(self, backend: OwnLoopBackend, file: Path, out: RunDirectory) -> None:
        self.last: dict[str, Any] | None = None
        self._backend, self._file, self._out = backend, file, out
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._read = 0
        self._held: list[dict[str, Any]] = []
        self._failed: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._failed is not None and kind is None:
            raise self._failed

    def _follow(self) -> None:
        try:
            while not self._done.wait(_POLL_SECONDS):
                self._record()
            self._record()
            self._write(self._held)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for this one
            self._failed = error

    def _record(self) -> None:
        """Record the steps that were there at the last look, and hold those that were written since.

        A library that writes each line in a task of its own (instructlab-training) writes two steps in any order.
        """
        known, found = {line["step"] for line in self._held}, list(self._held)
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._read)
            written = file.read()
            whole = written[: written.rfind(b"\n") + 1]
            self._read += len(whole)
            for logged in whole.splitlines():
                line = self._backend.line(json.loads(logged))
                if line is not None:
                    found.append(line)
        found.sort(key=lambda line: line["step"])
        ready = sum(line["step"] <= max(known, default=-1) for line in found)
        self._write(found[:ready])
        self._held = found[ready:]

    def _write(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._out.metrics(line)
            self.last = line


def exports(folder: Path) -> Iterator[tuple[float, Path]]:
    """Yield the number of samples and the folder of each export; inf for `last_epoch`."""
    for each in folder.glob("*/"):
        name = each.name.removeprefix("samples_")
        if each.name == "last_epoch":
            yield math.inf, each
        elif name.replace(".", "", 1).isdigit():
            yield float(name), each


def write_rows(items: Any, file: Path) -> None:
    """Write a store's samples as lines of `input_ids`, `labels` and `len`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for example in items.store:
            ids, labels = example.input_ids.tolist(), example.labels.tolist()
            lines.write(json.dumps({"input_ids": ids, "labels": labels, "len": len(ids)}) + "\n")
