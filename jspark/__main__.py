"""`python -m jspark` is the command `jspark`."""

import sys

from jspark.cli import main

sys.exit(main())
