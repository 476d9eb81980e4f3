"""Plan files: read strictly, written canonically, named by a digest.

The same plan always has the same text; comments and layout that a person adds are not part of it.
"""

import hashlib
from pathlib import Path

from plans.files import write_text
from plans.plan import Plan
from plans.strict_yaml import read_record, record_text

_HEAD = """\
# A hotspa plan. Times are seconds, sizes bytes, lengths tokens. After editing it: hotspa check FILE
"""


def read_plan(path: str | Path) -> Plan:
    """Read a plan. Its types are checked here, its sense by `plans.check`.

    Raises:
        InputError: file:line, key and the nearest legal key or value.
    """
    return read_record(path, Plan)


def plan_text(plan: Plan) -> str:
    """The canonical text: the same plan, the same bytes."""
    return _HEAD + record_text(plan)


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan whole or not at all. Raises InputError: it cannot be written."""
    write_text(path, plan_text(plan))


def plan_digest(plan: Plan) -> str:
    """`sha256:...` of the canonical text; ranks compare it before they start."""
    return f"sha256:{hashlib.sha256(plan_text(plan).encode()).hexdigest()}"
