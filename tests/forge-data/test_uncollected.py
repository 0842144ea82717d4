"""First use of a library in a process of one command: what it makes is kept out of every search for garbage."""

import subprocess
import sys

SCRIPT = """
import gc, sys
from forge_data._uncollected import uncollected
from forge_data.cli._parser import main
main(["--help"])
with uncollected():
    assert gc.isenabled()
assert gc.get_freeze_count() == 0, "words were given: another program's process"
sys.argv = ["forge-data", "--help"]
main()
gc.disable()
with uncollected():
    pass
assert gc.get_freeze_count() == 0 and not gc.isenabled(), "somebody else has turned it off"
gc.enable()
try:
    with uncollected():
        assert not gc.isenabled()
        raise KeyError
except KeyError:
    pass
assert gc.get_freeze_count() > 1000 and gc.isenabled()
"""


def test_a_command_keeps_its_libraries_out_of_later_collections():
    """In a process of its own, also after an error; a process that is somebody else's is left as it is."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=600, stdout=subprocess.DEVNULL)
