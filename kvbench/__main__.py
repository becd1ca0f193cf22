"""`python -m kvbench`: the command line, which is `kvbench.cli.main`."""

import sys

from kvbench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
