"""`python -m forge_data VERB`."""

import sys

from forge_data.cli._parser import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    sys.exit(main(prog="python -m forge_data"))
