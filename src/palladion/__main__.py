"""`python -m palladion`: the same as the `palladion` command."""

import sys

from palladion.cli import main

if __name__ == "__main__":
    sys.exit(main())
