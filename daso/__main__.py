"""``python -m daso``: the same as the `daso` command."""

import sys

from daso.run.cli import main

sys.exit(main())
