"""First use of a library: Python looks for no garbage meanwhile, and afterwards as it did before."""

import gc
import subprocess
import sys

import pytest

from forge._uncollected import uncollected


@pytest.mark.parametrize("before", [True, False])
def test_it_is_afterwards_as_it_was(before):
    """Whether collections were on or off, inside of another block, and after an error; nothing is frozen."""
    was, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError), uncollected():
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is before
        assert gc.get_freeze_count() <= frozen
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.slow
def test_a_command_keeps_its_libraries_out_of_later_collections():
    """Of a process of its own, which the command says; the verbs called from Python leave it to the caller."""
    script = """
import gc, sys
from forge._uncollected import uncollected
with uncollected():
    held = [[number] for number in range(1000)]
assert gc.get_freeze_count() == 0 and gc.isenabled()
from forge.cli._app import main
main(["--version"])
with uncollected():
    pass
assert gc.get_freeze_count() == 0, "words were given: another program's process"
sys.argv = ["forge", "--version"]
main()
with uncollected():
    assert not gc.isenabled()
assert gc.get_freeze_count() > 1000 and gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)
