"""``python -m daso``: the same as the `daso` command."""

import sys

from daso.cli.main import main

sys.exit(main())
