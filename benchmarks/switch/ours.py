"""Ours: the switch as the executor runs it, in memory that it keeps from one to the next."""

from benchmarks.switch.case import Case, Weights
from executor.backbone import Holding
from executor.exchange import Cargo
from executor.switch import Switcher


class Ours:
    """Over sockets or out of the peers' storage, as the switcher was made."""

    def __init__(self, case: Case, switcher: Switcher) -> None:
        self._case, self._switcher = case, switcher

    def run(self) -> Weights:
        case = self._case
        held = Holding(dict(case.old))  # the tensors stay for the next run
        return self._switcher.run(case.source, case.target, held, Cargo.WEIGHTS).weights
