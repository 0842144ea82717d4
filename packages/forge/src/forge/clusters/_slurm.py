"""A recipe → an sbatch file that trains it on Slurm's nodes and requeues itself."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from forge._errors import SettingsError
from forge._new_file import write_new_file
from forge.clusters._checks import count, processes
from forge.clusters._config import ForgeConfig

_WORD = re.compile(r"[\w.,:@%+/=\[\]-]+")
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d\d?(:\d\d){0,2}", re.ASCII)

_EXAMPLES = {"data_path": "/shared/train.jsonl", "ckpt_output_dir": "/shared/runs/first"}
"""Required setting → a value that a message shows; the others are models."""
_MOST_GRACE = 65535
"""Seconds that Slurm's option --signal takes at most."""


def sbatch(
    recipe: str | Path,
    *,
    nodes: int = 1,
    gpus: int = 0,
    nproc_per_node: int | None = None,
    verb: str | None = None,
    name: str | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    grace: int = 300,
    output: str | Path | None = None,
) -> str:
    """Write an sbatch file that runs a recipe, and requeues itself when it is stopped.

    The job reads the recipe from where it lies now: it, its model, its data and its ckpt_output_dir must lie on directories
    that the nodes share.

    Args:
        recipe: A YAML file of settings.
        nodes: Nodes.
        gpus: Accelerators of each node; 0 leaves the line out.
        nproc_per_node: Processes on each node; by default the recipe's, or one for each accelerator.
        verb: Training verb; by default the recipe's line `verb:`, or sft.
        name: Name of the job; by default forge-VERB.
        time: Time limit, as Slurm has it, such as 24:00:00; by default the partition's.
        partition: Partition of the nodes.
        account: Account that the job is charged to.
        grace: Seconds before the time limit at which the run is told to save its state and end.
        output: The file to write, which must not exist; by default it is printed.

    """
    config = ForgeConfig.of_recipe(recipe, verb)
    missing = config.open_names(config.to_settings())
    settings = config.checked(**dict.fromkeys(missing, "?"))  # says first what is wrong with those that are given
    if missing:
        raise SettingsError(
            f"{recipe} leaves {', '.join(missing)} open, and the job runs it as it is: write into it a line each, such as "
            f"`{missing[0]}: {_EXAMPLES.get(missing[0], 'org/model')}`."
        )
    count("nodes", nodes, 1)
    count("gpus", gpus, 0)
    count("grace", grace, 1)
    if grace > _MOST_GRACE:
        raise SettingsError(f"grace must be at most {_MOST_GRACE} seconds, not {grace}.")
    procs = processes(settings, nodes, gpus, nproc_per_node)
    job = f"forge-{config.verb}" if name is None else name
    for argument, value in (("name", job), ("partition", partition), ("account", account)):
        if value is not None and not _WORD.fullmatch(value):
            raise SettingsError(f"{argument} must be one word of letters, digits and .,:@%+/=[]-, not {value!r}.")
    if "/" in job:
        raise SettingsError(f"name must have no /, for the log file is named after it, not {job!r}.")
    if time is not None and not _TIME.fullmatch(time):
        raise SettingsError(f"time must be a time limit of Slurm, such as 24:00:00 or 1-12, not {time!r}.")
    options = [
        f"job-name={job}",
        f"nodes={nodes}",
        "ntasks-per-node=1",
        *([f"gpus-per-node={gpus}"] if gpus else []),
        *(f"{key}={value}" for key, value in (("time", time), ("partition", partition), ("account", account)) if value),
        "requeue",
        "open-mode=append",
        "output=%x-%j.log",
        f"signal=B:USR1@{grace}",
    ]
    # In words that no shell takes apart, and the recipe by its whole path: the job may begin elsewhere.
    command = shlex.join([*config.entrypoint, os.path.abspath(Path(recipe).expanduser()), f"--nproc-per-node={procs}"])
    text = _SCRIPT.format(
        verb=config.verb,
        options="\n".join(f"#SBATCH --{option}" for option in options),
        directory=shlex.quote(os.getcwd()),
        grace=grace,
        command=command,
    )
    return text.rstrip("\n") if output is None else f"{write_new_file(output, text)}: submit it with sbatch"


_SCRIPT = """\
#!/bin/bash
# forge {verb} under Slurm, written by `forge slurm render`. Submit it with sbatch.
{options}

cd -- {directory} || exit 2

# Signs what the nodes tell each other; srun passes it on, and no other job knows it.
export FORGE_RUN_SECRET="${{FORGE_RUN_SECRET:-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d '[:space:]')}}"

# One task a node, which starts the node's ranks itself and finds the others by Slurm's variables. A task that ended with its
# state saved must not take the others, which are still writing, with it.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 {command} &
step=$!

# {grace} seconds before the time limit Slurm sends USR1 to this script alone; the ranks are sent TERM, finish their step, save
# their state and end with 75. A preemption sends TERM to the ranks by itself; here it is ignored, for a second TERM would end
# them at once.
trap 'kill -TERM "$step" 2>/dev/null' USR1
trap : TERM
while :; do
    wait "$step"
    status=$?
    kill -0 "$step" 2>/dev/null || break
done

# 75: stopped with its state saved. 143: stopped before there was one. Either way the same job goes on, unless scancel ended it.
if [ "$status" -eq 75 ] || [ "$status" -eq 143 ]; then
    case "$(scontrol show job --oneliner "$SLURM_JOB_ID")" in
        *JobState=CANCELLED*) ;;
        *) scontrol requeue "$SLURM_JOB_ID" && echo "requeued: status $status" ;;
    esac
fi
exit "$status"
"""
