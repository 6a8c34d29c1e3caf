"""How long a test waits for something that may never come.

No test may depend on speed. A limit is there to turn a hang into a failure, so it is
far above what a loaded machine needs.
"""

from datetime import timedelta

HANG_SECONDS = 1800
HANG = timedelta(seconds=HANG_SECONDS)
