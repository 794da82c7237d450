"""`python -m k3hal.cli` is the `k3hal` command."""

import sys

from k3hal.cli import main

if __name__ == "__main__":
    sys.exit(main())
