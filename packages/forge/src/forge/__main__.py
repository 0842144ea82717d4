"""`python -m forge` is the command `forge`."""

import sys

from forge._cli import main

if __name__ == "__main__":
    sys.exit(main())
