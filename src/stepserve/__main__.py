"""``python -m stepserve``: the same as the command ``stepserve``."""

import sys

from stepserve.cli.main import main

sys.exit(main())
