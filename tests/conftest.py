"""Settings that every test shares."""

import os

from hypothesis import settings

# No deadline: the time of one example says nothing on a shared machine. In CI the examples are the same in every run.
settings.register_profile("hotspa", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("hotspa")
