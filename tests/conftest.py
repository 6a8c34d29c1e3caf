"""Makes `tests/helpers` importable as `helpers`, and test runs repeatable."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
