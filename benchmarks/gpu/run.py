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
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _here import CHECKS, Here
from _report import versions

SECONDS = 600.0
MODULES = ("_right", "_right_images", "_right_training", "_right_state", "_families", "_verbs", "_speed", "_speed_trl", "_tax")
for module in MODULES:
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


def apart(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one check in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder) / "answer", Path(folder) / "output"
        process = _server().Process(target=_inside, args=(name, options.device, options.toy, str(answer), str(output)))
        process.start()
        process.join(options.seconds)
        if process.is_alive():
            process.kill()
            return {"check": name, "ok": False, "error": f"it took more than {options.seconds:.0f} s"}
        if answer.is_file():
            return json.loads(answer.read_text(encoding="utf-8"))
        said = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
        return {"check": name, "ok": False, "error": f"exit status {process.exitcode}", "output": said[-1500:]}


@cache
def _server() -> Any:
    """Return the server that checks are forked from, which imports what opens no device: bitsandbytes does, and so PEFT."""
    paths = [str(Path(__file__).resolve().parent), *sys.path[:2], os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*MODULES, "torch", "transformers.models.llama.modeling_llama", "forge"])
    return context


def _inside(name: str, device: str, toy: bool, answer: str, output: str) -> None:
    """Write the line of one check to the file `answer`; all that it prints goes to `output`."""
    with Path(output).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    line = json.dumps(one(name, Here(device, toy=toy)), default=str)
    Path(answer + ".part").write_text(line, encoding="utf-8")
    Path(answer + ".part").rename(answer)


def main() -> None:
    """Run the checks that were asked for, and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=["right", "speed"])
    parser.add_argument("--only", help="names of checks, with commas between them")
    parser.add_argument("--device", default="auto", help="a name that forge_accel knows")
    parser.add_argument("--toy", action="store_true", help="toy shapes that run in seconds on a CPU and prove no speed")
    parser.add_argument("--in-process", action="store_true", help="all in this process, one after the other")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each check at most")
    parser.add_argument("--jobs", type=int, default=1, help="checks of correctness at a time; speed is measured alone")
    options = parser.parse_args()
    asked = None if options.only is None else options.only.split(",")
    if asked and (unknown := sorted(set(asked) - set(CHECKS))):
        parser.error(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    names = [name for name, each in CHECKS.items() if options.group in (None, each.group) and (asked is None or name in asked)]
    here, found = Here(options.device, toy=options.toy), []
    run = partial(one, here=here) if options.in_process else partial(apart, options=options)
    right = [name for name in names if CHECKS[name].group == "right"]
    with ThreadPoolExecutor(options.jobs) as pool:
        at_once = (done.result() for done in as_completed([pool.submit(run, name) for name in right]))
        for line in chain(at_once, map(run, [name for name in names if name not in right])):
            found.append(line | {"chip": here.machine.machine, "versions": versions()})
            print(json.dumps(found[-1], default=str), flush=True)
    by_result = {word: [line["check"] for line in found if line["ok"] is ok] for word, ok in RESULTS.items()}
    print(json.dumps({"check": "summary", **by_result, "chip": here.machine.machine}), flush=True)
    raise SystemExit(1 if by_result["failed"] else 0)


RESULTS = {"passed": True, "failed": False, "measured": None}
"""Words of the summary for `ok`."""

if __name__ == "__main__":
    main()
