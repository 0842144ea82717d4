"""GPU acceptance: is forge right on this device, and how fast is it? One JSON line a check, a summary at the end.

    python benchmarks/gpu/run.py --group right                # correctness
    python benchmarks/gpu/run.py --group speed                # tokens a second, MFU, the tax of exactness
    python benchmarks/gpu/run.py --only kernel,waits          # single checks
    python benchmarks/gpu/run.py --device cpu --toy          # dry run: toy shapes, no claim

Needs no network and no model files. Each check runs in a process of its own: a fresh allocator, so that peaks are its own, and
running out of memory is that check's result alone. Line: {"check", "group", "ok": true|false|null, "seconds", ...facts,
"chip", "versions"}; ok is null where there is nothing to pass.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _here import CHECKS, Here
from _report import versions

SECONDS = 600.0
for module in ("_right", "_right_training", "_right_state", "_speed", "_speed_trl", "_tax"):
    importlib.import_module(module)


def one(name: str, here: Here) -> dict[str, Any]:
    """Run one check in this process; whatever it raises is its result."""
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            good, facts = CHECKS[name].run(here)
    except Exception as error:
        places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]
        good, facts = False, {"error": f"{type(error).__name__}: {str(error)[:600]}", "at": places}
    seconds = round(time.perf_counter() - started, 1)
    return {"check": name, "group": CHECKS[name].group, "ok": good, "seconds": seconds, "toy": here.toy, **facts}


def apart(name: str, options: argparse.Namespace, left: float) -> dict[str, Any]:
    """Run one check in a process of its own."""
    words = [sys.executable, __file__, "--inside", name, "--device", options.device, *(["--toy"] if options.toy else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {"check": name, "ok": False, "error": f"it took more than {left:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    return {"check": name, "ok": False, "error": f"exit status {done.returncode}", "stderr": done.stderr[-1500:]}


def main() -> None:
    """Run the checks that were asked for, and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=["right", "speed"])
    parser.add_argument("--only", help="names of checks, with commas between them")
    parser.add_argument("--device", default="auto", help="a name that forge_accel knows")
    parser.add_argument("--toy", action="store_true", help="toy shapes that run in seconds on a CPU and prove no speed")
    parser.add_argument("--in-process", action="store_true", help="all in this process, one after the other")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each check at most")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        channel.write(json.dumps(one(options.inside, Here(options.device, toy=options.toy)), default=str) + "\n")
        return
    asked = None if options.only is None else options.only.split(",")
    if asked and (unknown := sorted(set(asked) - set(CHECKS))):
        parser.error(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    names = [name for name, each in CHECKS.items() if options.group in (None, each.group) and (asked is None or name in asked)]
    here = Here(options.device, toy=options.toy)
    found = []
    for name in names:
        line = one(name, here) if options.in_process else apart(name, options, options.seconds)
        line |= {"chip": here.machine.machine, "versions": versions()}
        found.append(line)
        print(json.dumps(line, default=str), flush=True)
    by_result = {word: [line["check"] for line in found if line["ok"] is ok] for word, ok in RESULTS.items()}
    print(json.dumps({"check": "summary", **by_result, "chip": here.machine.machine}), flush=True)
    raise SystemExit(1 if by_result["failed"] else 0)


RESULTS = {"passed": True, "failed": False, "measured": None}
"""Words of the summary for `ok`."""

if __name__ == "__main__":
    main()
