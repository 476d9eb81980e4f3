"""A small sound plan for the tests of what plans do."""

import pytest

from plans.plan import Plan
from tests.builders import small_plan


@pytest.fixture
def plan() -> Plan:
    """Two phases on 4 ranks: 1..64 under dp4, 65..256 under tp2pp2; home like the second."""
    return small_plan()
