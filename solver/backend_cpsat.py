"""The circuit form solved by CP-SAT. Runs in a child process of `solver.backend` only."""

from ortools.sat.python import cp_model

from solver.formulation import CIRCUIT_UNITS, Scale, Variables, build_circuit
from solver.instance import Instance
from solver.values import Ended, RawAnswer, Values


def solve(instance: Instance, time_limit_s: float, seed: int) -> RawAnswer:
    """Solve one instance. Without the clock striking, the same input gives the same answer."""
    model = cp_model.CpModel()
    variables = build_circuit(model, instance)
    solver = cp_model.CpSolver()
    # CP-SAT repeats itself with one worker, a seed and a limit in its own, deterministic time only.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = time_limit_s
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)
    scale = Scale.of(instance, CIRCUIT_UNITS)
    if status == cp_model.INFEASIBLE:
        return RawAnswer(ended=Ended.infeasible)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if status == cp_model.MODEL_INVALID:
            raise ValueError(model.validate())
        return RawAnswer(ended=Ended.limit)
    return RawAnswer(
        ended=Ended.optimal if status == cp_model.OPTIMAL else Ended.limit,
        values=_values(solver, variables),
        bound_s=scale.seconds(solver.best_objective_bound),
    )


def _values(solver: cp_model.CpSolver, variables: Variables) -> Values:
    return Values(
        columns=tuple(k for k, y in enumerate(variables.columns) if solver.boolean_value(y)),
        homes=tuple(h for h, x in enumerate(variables.homes) if solver.boolean_value(x)),
        arcs=tuple(arc for arc, z in variables.arcs.items() if solver.boolean_value(z)),
    )
