"""`python -m forge` is the command `forge`."""

import sys

from forge.cli._app import main

if __name__ == "__main__":
    sys.exit(main())
