"""Settings that every test shares."""

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadline: the time of one example says nothing on a shared machine. In CI the examples are the same in every run.
settings.register_profile("hotspa", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("hotspa")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own() -> Iterator[None]:
    """What tests make of a corpus must not land in the user's cache, nor be found there."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTSPA_CACHE", folder)
        yield
