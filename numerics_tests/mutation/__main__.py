"""``python -m numerics_tests.mutation``."""

import sys

from numerics_tests.mutation.run import main

sys.exit(main())
