"""Random faults over ranks and strategies: `hatch run chaos --seed N --faults 200`.

Each case runs a tiny model, strikes it (kill, stop, cut link, full disk, flipped byte, clock jump), gives the same command
again and compares with an undisturbed run. Writes docs/lanes/chaos.json and a section of docs/parity.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import lane
from repository import RESULTS, ROOT

sys.path.insert(0, str(ROOT))

HEAD = "## Random faults"


def main(arguments: list[str]) -> int:
    """Run what is not done yet, write what it came to, return whether anything failed."""
    parser = argparse.ArgumentParser(prog="hatch run chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the faults that are drawn")
    parser.add_argument("--faults", type=int, default=200, help="number of cases")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    options = parser.parse_args(arguments)
    chaos = import_module("tests.whole.chaos")
    state = lane.Lane(f"chaos-{options.seed}", fresh=options.fresh)
    drawn = {str(number): chaos.draw(options.seed, number) for number in range(options.faults)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        ground = chaos.Ground(Path(folder))
        state.run({name: partial(ground.case, fault) for name, fault in drawn.items()}, options.workers)
    results = [state.done[name] for name in drawn]
    failed = [result["says"] for result in results if result["failed"]]
    about = {
        "command": f"hatch run chaos --seed {options.seed} --faults {options.faults}",
        "origin": lane.origin(f"hatch run chaos --seed {options.seed} --faults {options.faults}"),
        "seconds": round(time.monotonic() - began),
        "cases": len(results),
        "failed": len(failed),
        "results": results,
    }
    (RESULTS / "chaos.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    page = ROOT / "docs" / "parity.md"
    page.write_text(with_section(page.read_text(encoding="utf-8"), chaos.section(about)), encoding="utf-8")
    print("\n".join([*failed, chaos.section(about)]))
    return int(bool(failed))


def with_section(text: str, section: str) -> str:
    """Return docs/parity.md with its last section replaced."""
    return re.split(rf"^{HEAD}$", text, flags=re.MULTILINE)[0].rstrip() + f"\n\n{section}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
