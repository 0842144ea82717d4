"""Every leaf's tests where it is alone: `hatch run alone [PACKAGE ...] [pytest's arguments]`.

`hatch test --all` ends at the first leaf that fails; here each runs, and the exit status says whether any failed.
"""

from __future__ import annotations

import subprocess
import sys

from repository import FACADE, ROOT, packages


def main(arguments: list[str]) -> int:
    """Run the tests of the leaves that are named first, or of all; the rest goes to pytest."""
    leaves = [folder for folder in packages() if folder != FACADE]
    named = []
    while arguments and arguments[0] in leaves:
        named.append(arguments.pop(0))
    states = {}
    for leaf in named or leaves:
        command = ["hatch", "test", "-i", f"package={leaf}", "--", f"tests/{leaf}", *arguments]
        states[leaf] = subprocess.run(command, cwd=ROOT, check=False).returncode
    print("\n" + "\n".join(f"{leaf:16} {'ok' if not state else f'FAILED ({state})'}" for leaf, state in states.items()))
    return int(any(states.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
