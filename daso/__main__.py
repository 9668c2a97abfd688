"""Runs the `daso` command as ``python -m daso``."""

import sys

from daso.cli.main import main

sys.exit(main())
