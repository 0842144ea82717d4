"""The tax of exactness: what proofs, sums and verified exports take of a run, and the loop's guards of a step.

Whole runs of `forge.sft`, one with all and one with none (its functions replaced here; nobody can set
that), whose functions are timed where they run. And steps of forge's loop beside a bare one's. A run of 1,000 steps with one
export is what the limit of 3 % is for: proofs and exports cost the same in a short run.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from _here import Here, check
from _right_training import prepared_run
from _speed import side

MOST, STEPS = 0.03, 1000
"""Largest share, and the steps of the run that it is a share of."""


def _without(here: Here) -> dict[str, Callable[..., Any]]:
    """Return what stands in the place of each function that only proves."""
    from forge_algos.memory._findings import pass_for_probed
    from forge_dist.verifying._result import ExportCheck

    def apart(model: Any, **_: Any) -> tuple[bool, str]:
        pass_for_probed(model, device=here.device)
        return True, "not proved"

    nothing = ExportCheck(in_memory=1.0, reloaded=1.0, difference=0.0, tolerance=1.0, loss_tokens=1, tensors=1)
    return {
        "forge_algos.keep_documents_apart": apart,
        "forge_dist.check_export": lambda *_, **__: nothing,
        "forge.run._run.refuse_damaged": lambda *_: None,
        "forge.run._run.verify_on_node": lambda *_: None,
        "forge.saving._exports.hash_export": lambda folder, *_: {file.name: "" for file in Path(folder).iterdir()},
    }


@contextmanager
def _timed(names: Iterator[str] | list[str], seconds: Counter[str]) -> Iterator[None]:
    """Add up the time of each function."""
    with ExitStack() as stack:
        for name in names:
            module, _, last = name.rpartition(".")
            own = getattr(__import__(module, fromlist=[last]), last)

            def timed(*given: Any, _own: Any = own, _name: str = last, **more: Any) -> Any:
                began = time.perf_counter()
                try:
                    return _own(*given, **more)
                finally:
                    seconds[_name] += time.perf_counter() - began

            stack.enter_context(patch(name, timed))
        yield


@check("speed")
def tax(here: Here) -> tuple[bool | None, dict[str, Any]]:
    """Compare a run with proofs, sums and verified exports with one without; and forge's loop with a bare one."""
    import forge

    walls: dict[str, float] = {}
    proofs = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        base, steps = Path(folder), 3 if here.toy else 10
        # Compiling takes as long with proofs as without, and longer than either run.
        how = prepared_run(here, base, "1b", length=20 if here.toy else 900) | {"max_steps": steps, "compile": "off"}
        for name in ("with", "without"):
            replaced = _without(here)
            with ExitStack() as stack:
                if name == "with":
                    stack.enter_context(_timed(list(replaced), proofs))
                else:
                    for target, function in replaced.items():
                        stack.enter_context(patch(target, function))
                began = time.perf_counter()
                forge.sft(**how, ckpt_output_dir=str(base / name))
                walls[name] = time.perf_counter() - began
    fixed = sum(proofs.values())
    ours, bare = (side(here, "", "1b", 16_384, **more)[1]["seconds_per_step"] for more in ({}, {"bare": True}))
    of_step = max(0.0, ours - bare)
    share = (fixed + STEPS * of_step) / (fixed + STEPS * ours)
    facts = {
        "share": round(share, 4), "most": MOST, "of_a_run_of_steps": STEPS, "proofs_seconds": round(fixed, 3),
        "parts_seconds": {name: round(each, 3) for name, each in proofs.items()},
        "share_of_a_step": round((ours - bare) / ours, 4), "steps": steps,
        "run_seconds": {name: round(each, 2) for name, each in walls.items()},
        "with_over_without": round(walls["with"] / walls["without"], 4),
    }  # fmt: skip
    return None if here.toy else share <= MOST, facts
