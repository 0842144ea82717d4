"""Run directories → `forge compare`, which takes any number of them."""

from __future__ import annotations

from typing import Annotated, Any

import cyclopts


def compare_command() -> Any:
    """Build `forge compare RUN RUN ...`."""
    from forge.reports._compare import compare

    def command(
        *runs: Annotated[str, cyclopts.Parameter(help="Run directories, two or more.")],
        output: Annotated[
            str, cyclopts.Parameter(help="Where to write the page; one that is there is replaced.")
        ] = "compare.html",
    ) -> None:
        """Lay the curves of runs over each other, and list the settings that differ.

        Prints the settings that differ, the last figures, and the path of the page.

        Example: forge compare runs/first runs/second
        """
        print(compare(runs, output=output))

    made: Any = command
    made.flags = {"output": "--output"}
    return made
