"""The flow form solved through PuLP by HiGHS or CBC. Runs in a child process of `solver.backend` only.

PuLP calls a solve that the clock stopped "Optimal"; only `sol_status` tells the difference, and without an incumbent
the variables hold fractional values. Hence every value is rounded with a check, and the parent judges the choice
anew.
"""

import math
from typing import Any

import pulp

from solver.formulation import FLOW_UNITS, Scale, Variables, build_flow, flow_objective
from solver.instance import Instance
from solver.values import Ended, RawAnswer, Values

ROUNDING = 1e-5  # farthest that a binary variable's value may be from 0 or 1


class _Infeasible(Exception):
    """A constraint without variables that cannot hold."""


def solve(instance: Instance, solver_name: str, time_limit_s: float, seed: int) -> RawAnswer:
    """Solve one instance by "highs" or "cbc"."""
    problem = pulp.LpProblem("hotspa", pulp.LpMinimize)

    def add(constraint: Any) -> None:
        if constraint is False:
            raise _Infeasible
        if constraint is not True:
            problem.addConstraint(constraint)

    def variable(name: str, most: float, integer: bool) -> Any:
        return problem.add_variable(name, 0, most, pulp.LpInteger if integer else pulp.LpContinuous)

    scale = Scale.of(instance, FLOW_UNITS)
    try:
        variables = build_flow(add, variable, instance)
    except _Infeasible:
        return RawAnswer(ended=Ended.infeasible)
    problem.setObjective(flow_objective(instance, variables, scale))
    problem.solve(_solver(solver_name, time_limit_s, seed))
    if problem.sol_status in (pulp.LpSolutionInfeasible, pulp.LpSolutionUnbounded):
        return RawAnswer(ended=Ended.infeasible)
    ended = Ended.optimal if problem.sol_status == pulp.LpSolutionOptimal else Ended.limit
    bound = _bound(problem, solver_name, ended)
    return RawAnswer(
        ended=ended,
        values=_values(variables) if problem.sol_status != pulp.LpSolutionNoSolutionFound else None,
        bound_s=None if bound is None else scale.seconds(bound),
    )


def _solver(name: str, time_limit_s: float, seed: int) -> Any:
    exact = {"msg": False, "timeLimit": time_limit_s, "gapRel": 0.0, "gapAbs": 0.0, "threads": 1}
    if name == "highs":
        return pulp.HiGHS(**exact, random_seed=seed % 2**31)
    return pulp.PULP_CBC_CMD(**exact, options=[f"randomSeed {seed % 2**31}"])


def _bound(problem: Any, solver_name: str, ended: Ended) -> float | None:
    """The solver's proven bound, in units. CBC tells none through PuLP, except by ending."""
    if solver_name == "highs":
        bound = float(problem.solverModel.getInfo().mip_dual_bound)
        return bound if math.isfinite(bound) else None  # -inf: stopped before its first relaxation
    return float(problem.objective.value()) if ended is Ended.optimal else None


def _values(variables: Variables) -> Values | None:
    columns = [_rounded(y) for y in variables.columns]
    homes = [_rounded(x) for x in variables.homes]
    arcs = {arc: _rounded(z) for arc, z in variables.arcs.items()}
    if None in columns or None in homes or None in arcs.values():
        return None
    return Values(
        columns=tuple(k for k, on in enumerate(columns) if on),
        homes=tuple(h for h, on in enumerate(homes) if on),
        arcs=tuple(arc for arc, on in arcs.items() if on),
    )


def _rounded(variable: Any) -> int | None:
    """0 or 1; None if the value is neither within the tolerance."""
    value: float | None = variable.varValue
    if value is None or abs(value - round(value)) > ROUNDING:
        return None
    return round(value)
