"""``python -m capibara``."""

import sys

from capibara.cli import main

sys.exit(main())
