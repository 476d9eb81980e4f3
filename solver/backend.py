"""Solving an instance in a process of its own, under a wall-clock limit, without believing the answer.

The parent writes instances to a child (`python -m solver.backend`), waits no longer than the limit, and ends it. So a
crash in a native library, a time limit that a solver ignores, or two libraries that clash in one process cost an
answer and never the plan. What the child returns is decoded, judged and priced here; a backend that fails is followed
by the next.

Only the modules solver.backend* import ortools, pulp or highspy, and only the child does.
"""

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from solver.instance import Choice, Column, Instance, objective_s, violations
from solver.values import Ended, RawAnswer, decode

Backend = Literal["cpsat", "highs", "cbc"]
BACKENDS: tuple[Backend, ...] = ("cpsat", "highs", "cbc")  # in the order in which they replace each other
TOLERANCE = 1e-6  # relative: an objective this close to the bound is proven optimal


_LONGEST_WAIT_S = 1e6  # what the system can wait for is limited; eleven days are enough
_LONGEST_NOTE = 200  # characters of an error that go into a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The judged answer of the first backend that gave a sound one."""

    choice: Choice | None  # None: nothing found
    bound_s: float | None  # no choice of the instance is faster; None: nothing proven
    backend: Backend | None  # None: none answered
    infeasible: bool = False
    stopped: bool = False  # by the clock
    notes: tuple[str, ...] = ()  # one sentence for everything that went wrong


def solve_instance(
    instance: Instance, backend: Backend, time_limit_s: float, seed: int, incumbent: Choice | None = None
) -> Answer:
    """The best choice that a backend finds in the time; the wanted backend first, then the others.

    The incumbent is a known solution: it is not handed to the solver (a complete hint can still be lost in presolve),
    it unmasks a backend that calls the instance infeasible or proves a bound above it.
    """
    deadline_s = time.monotonic() + time_limit_s
    notes: list[str] = []
    for name in (backend, *(other for other in BACKENDS if other != backend)):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        raw = run_child([instance], name, left_s, seed)[0]
        try:
            answer = judge(instance, raw, name, incumbent)
        except ValueError as wrong:
            notes.append(f"backend {name} failed: {wrong}")
            continue
        return replace(answer, notes=tuple(notes))
    return Answer(choice=None, bound_s=None, backend=None, notes=tuple(notes))


def judge(instance: Instance, raw: RawAnswer, name: Backend, incumbent: Choice | None = None) -> Answer:
    """What a raw answer is worth.

    Raises:
        ValueError: the backend failed, or its answer contradicts itself or the incumbent.
    """
    if raw.ended is Ended.failed:
        raise ValueError(raw.note or "it gave no answer")
    if raw.ended is Ended.infeasible:
        if incumbent is not None:
            raise ValueError("it calls a problem infeasible that has a solution")
        return Answer(choice=None, bound_s=None, backend=name, infeasible=True)
    if raw.bound_s is not None and not 0 <= raw.bound_s < math.inf:
        raise ValueError(f"its bound is {raw.bound_s} s")
    choice = decode(instance, raw.values) if raw.values is not None else None
    known = [incumbent] if incumbent is not None else []
    if choice is not None:
        if broken := violations(instance, choice):
            raise ValueError(f"its answer breaks the model: {broken[0]}")
        known.append(choice)
    elif raw.ended is Ended.optimal:
        raise ValueError("it calls an answer optimal that is none")
    bound_s = raw.bound_s
    if bound_s is not None and known:
        least = min(objective_s(instance, each) for each in known)
        if bound_s > least * (1 + TOLERANCE):
            raise ValueError(f"it proves {bound_s:.9g} s for a problem with a solution of {least:.9g} s")
        bound_s = min(bound_s, least)
    return Answer(choice=choice, bound_s=bound_s, backend=name, stopped=raw.ended is Ended.limit)


def probe(backend: str, time_limit_s: float = 30.0) -> str:
    """Whether a backend works on this machine, found by solving a problem with one column; says so in a few words.

    Raises:
        RuntimeError: it does not; the message is the reason.
    """
    (name,) = (known for known in BACKENDS if known == backend)
    tiny = Instance(
        num_buckets=1,
        strategies=("dp1",),
        homes=("dp1",),
        columns=(Column(first=0, last=0, strategy=0, cost_s=1.0),),
        switch_s=((None,),),
        leave_s=((0.25,),),
        return_s=((0.25,),),
        optimizer_s=(0.5,),
    )
    started_s = time.monotonic()
    try:
        answer = judge(tiny, run_child([tiny], name, time_limit_s, seed=0)[0], name)
    except ValueError as wrong:
        raise RuntimeError(str(wrong)) from None
    if answer.choice != Choice(0, (0,)):
        raise RuntimeError(f"no answer within {time_limit_s:g} s")
    return f"solved a problem in {time.monotonic() - started_s:.1f} s"


def run_child(instances: Sequence[Instance], backend: Backend, time_limit_s: float, seed: int) -> list[RawAnswer]:
    """The raw answers of one child process to all instances; the limit is for all of them together."""
    request = {
        "backend": backend,
        "seed": seed,
        "time_limit_s": time_limit_s,
        "instances": [instance.to_json() for instance in instances],
    }
    # A session of its own: CBC is a program that the child starts, and ends with the child's process group.
    child = subprocess.Popen(
        child_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_child_environment(),
        start_new_session=True,
    )
    with child:
        try:
            out, err = child.communicate(json.dumps(request), timeout=min(time_limit_s, _LONGEST_WAIT_S))
        except subprocess.TimeoutExpired:
            return [RawAnswer(ended=Ended.limit)] * len(instances)
        finally:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    try:
        answers = [RawAnswer.from_fields(fields) for fields in json.loads(out.splitlines()[-1])]
        if len(answers) == len(instances):
            return answers
        reason = f"{len(answers)} answers to {len(instances)} problems"
    except (ValueError, LookupError, TypeError, ArithmeticError):
        last = err.strip().splitlines()[-1:] or ["it said nothing"]
        reason = f"exit code {child.returncode}, {last[0][:_LONGEST_NOTE]}"
    return [RawAnswer(ended=Ended.failed, note=reason)] * len(instances)


def child_command() -> list[str]:
    # -P: a file in the working directory must not take the place of a package.
    return [sys.executable, "-P", "-m", "solver.backend"]


def _child_environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _main() -> None:
    """The child: read the request, solve, write the answers as the last line."""
    started_s = time.monotonic()
    request = json.load(sys.stdin)
    backend, seed = request["backend"], request["seed"]
    module = importlib.import_module("solver.backend_cpsat" if backend == "cpsat" else "solver.backend_pulp")
    extra = () if backend == "cpsat" else (backend,)
    answers = []
    for text in request["instances"]:
        # The solver stops itself a little before the parent ends it, so that its incumbent is not lost.
        left_s = 0.9 * request["time_limit_s"] - (time.monotonic() - started_s)
        if left_s <= 0:
            answer = RawAnswer(ended=Ended.limit)
        else:
            answer = module.solve(Instance.from_json(text), *extra, left_s, seed)
        answers.append(asdict(answer))
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
