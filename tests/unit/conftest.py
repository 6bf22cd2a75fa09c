"""Property tests draw the same examples in every run, so that a red run can be repeated.

HYPOTHESIS_PROFILE=explore draws new ones.
"""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
