"""`python -m baton.cli` is `baton`."""

import sys

from baton.cli.main import main

sys.exit(main())
