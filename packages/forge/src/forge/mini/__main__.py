"""`python -m forge.mini` takes the flags of `mini_trainer.train`."""

import sys

from forge.mini._command import main

if __name__ == "__main__":
    sys.exit(main())
