"""Backend `forge`: the package's own loop, with all of its promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forge.backends._backend import Backend, Capabilities
from forge.backends._request import read_request

if TYPE_CHECKING:
    from forge._dry_run import DryRun
    from forge._result import RunResult


class ForgeBackend(Backend):
    """Forge's own loop."""

    name = "forge"

    def capabilities(self) -> Capabilities:
        """Return that it has everything."""
        return Capabilities()

    def execute_training(self, params: Mapping[str, object]) -> RunResult:
        """Run a training verb to its end."""
        from forge.run._run import run

        return run(*read_request(self, params))

    def rehearse(self, params: Mapping[str, object], *, target: str | None = None) -> DryRun:
        """Check, tokenize and plan a run in its directory, which is left as it was."""
        from forge.run._dry_run import rehearse

        task, s, rows, _ = read_request(self, params)
        return rehearse(task, s, rows, target=target)
