"""The backends against brute force, against each other, and against everything that can go wrong with them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from solver import backend
from solver.backend import BACKENDS, Backend, judge, probe, run_child, solve_instance
from solver.instance import Choice, Column, Instance, objective_s, violations
from solver.oracle import brute_force
from solver.values import Ended, RawAnswer, Values
from tests.solver.random_instances import random_instance

NUM_RANDOM = 300
RANDOM = [random_instance(seed) for seed in range(NUM_RANDOM)]
OPTIMA = [brute_force(instance) for instance in RANDOM]

# Two buckets; strategy a for the first and b for the second is best: 0.5 + 1 + 0.25 + 1 + 0.5 = 3.25 s, or 3.5 s the
# other way round. One phase takes 0.5 + 4 + 0.5 = 5 s under a.
SMALL = Instance(
    num_buckets=2,
    strategies=("a", "b"),
    homes=("a",),
    columns=(
        Column(first=0, last=0, strategy=0, cost_s=1.0),
        Column(first=1, last=1, strategy=1, cost_s=1.0),
        Column(first=0, last=1, strategy=0, cost_s=4.0),
    ),
    switch_s=((None, 0.25), (0.5, None)),
    leave_s=((0.5, 0.5),),
    return_s=((0.5,), (0.5,)),
    optimizer_s=(0.0,),
)
ONE_PHASE = Choice(0, (2,))
BEST = Values(columns=(0, 1), homes=(0,), arcs=((-1, 0, 0), (0, 1, None), (1, -1, 0)))


def answer_with(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let every child of the first backend asked run a script in the backend's stead."""
    commands = iter([[sys.executable, "-c", script]])
    real = backend.child_command
    monkeypatch.setattr(backend, "child_command", lambda: next(commands, None) or real())


def test_random_instances_have_all_kinds_of_optima() -> None:
    """Agreement on problems that all have one phase, or none a solution, would prove little."""
    phases = [len(found[1].columns) if found else 0 for found in OPTIMA]
    assert all(phases.count(n) >= 15 for n in range(4)), [phases.count(n) for n in range(5)]
    for found, instance in zip(OPTIMA, RANDOM, strict=True):
        assert found is None or objective_s(instance, found[1]) == pytest.approx(found[0])
    assert sum(bool(instance.refused_columns and instance.refused_switches) for instance in RANDOM) >= 50


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_finds_the_optimum_of_brute_force(name: Backend) -> None:
    """A formulation that forgets a constraint or a cost gives plans that cannot run or are not the best."""
    every = 4 if name == "cbc" else 1  # a process for each takes most of its time
    instances, optima = RANDOM[::every], OPTIMA[::every]
    for instance, found, raw in zip(instances, optima, run_child(instances, name, 200, seed=0), strict=True):
        answer = judge(instance, raw, name)
        if found is None:
            assert answer.infeasible
            continue
        assert answer.choice is not None and answer.bound_s is not None
        seconds = objective_s(instance, answer.choice)
        assert seconds == pytest.approx(found[0], rel=1e-6, abs=1e-7)
        assert seconds * (1 - 1e-6) - 1e-7 <= answer.bound_s <= seconds


@pytest.mark.parametrize("name", BACKENDS)
def test_the_same_instance_and_seed_give_the_same_choice(name: Backend) -> None:
    """Same input, same bytes begins here."""
    instances = RANDOM[:15]
    first, second = (run_child(instances * times, name, 100, seed=3)[:15] for times in (2, 1))
    assert first == second


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_probed_by_solving(name: Backend) -> None:
    """Listed as installed is not the same as able to run."""
    assert probe(name).startswith("solved a problem")


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reason nobody can repair the environment."""
    answer_with(monkeypatch, "raise ImportError('no such wheel')")
    with pytest.raises(RuntimeError, match="no such wheel"):
        probe("cpsat")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
        ("print('Optimal')", "exit code 0"),
        ("print('[]')", "0 answers to 1 problems"),
        ('print(\'[{"ended": "optimal", "values": null, "bound_s": 1.0, "note": null}]\')', "optimal that is none"),
        ('print(\'[{"ended": "infeasible", "values": null, "bound_s": null, "note": null}]\')', "infeasible"),
        ('print(\'[{"ended": "limit", "values": null, "bound_s": 9.5, "note": null}]\')', "proves 9.5 s"),
        ('print(\'[{"ended": "limit", "values": null, "bound_s": NaN, "note": null}]\')', "its bound is nan"),
        ('print(\'[{"ended": "limit", "values": null, "bound_s": -Infinity, "note": null}]\')', "its bound is -inf"),
        (
            'print(\'[{"ended": "limit", "values": {"columns": [Infinity], "homes": [0], "arcs": []},'
            ' "bound_s": null, "note": null}]\')',
            "exit code 0",
        ),
        ("import sys; sys.stdout.buffer.write(bytes([255, 254]))", "exit code 0"),
        ("import sys; sys.exit('x' * 10000)", "exit code 1"),
    ],
)
def test_a_backend_that_fails_is_named_and_the_next_one_solves(
    monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    """A crash of a native library, or an answer that contradicts a known plan, costs seconds and never the plan."""
    answer_with(monkeypatch, script)
    answer = solve_instance(SMALL, "cpsat", 60, seed=0, incumbent=ONE_PHASE)
    assert answer.backend == "highs"
    assert answer.choice == Choice(0, (0, 1))
    assert answer.bound_s == pytest.approx(3.25, rel=1e-6)
    assert len(answer.notes[0]) < 300
    assert len(answer.notes) == 1 and why in answer.notes[0] and "cpsat failed" in answer.notes[0]


@pytest.mark.parametrize(
    "values",
    [
        Values(columns=(0,), homes=(0,), arcs=((-1, 0, 0), (0, -1, 0))),  # the second bucket does not run
        Values(columns=(0, 1, 2), homes=(0,), arcs=BEST.arcs),  # both buckets run twice
        Values(columns=(0, 1), homes=(0,), arcs=((-1, 0, 0), (0, -1, 0))),  # b is used but never entered
        Values(columns=(0, 1), homes=(), arcs=BEST.arcs),
        Values(columns=(0, 1), homes=(0,), arcs=((-1, 0, 0), (0, -1, 0), (1, 1, None))),  # a cycle apart from home
        Values(columns=(0, 1), homes=(0,), arcs=((-1, 0, 0), (0, 1, None))),  # it never returns
        Values(columns=(0, 7), homes=(0,), arcs=BEST.arcs),
        Values(columns=(0, 1), homes=(9,), arcs=BEST.arcs),
        Values(columns=(0, 1), homes=(0,), arcs=((-1, 0, 0), (0, 9, None), (9, -1, 0))),
    ],
)
def test_an_answer_that_breaks_a_constraint_is_caught(values: Values) -> None:
    """Libraries have returned "Optimal" with values that violate the model; such a plan must never be written."""
    assert judge(SMALL, RawAnswer(ended=Ended.optimal, values=BEST, bound_s=3.25), "cpsat").choice is not None
    with pytest.raises(ValueError):  # noqa: PT011 - each breaks it in its own way
        judge(SMALL, RawAnswer(ended=Ended.optimal, values=values, bound_s=3.25), "cpsat")


def test_a_column_that_does_not_fit_beside_the_home_is_a_violation() -> None:
    """Memory is part of what is judged."""
    fields = json.loads(SMALL.to_json())
    tight = Instance.from_json(json.dumps({**fields, "refused_columns": [[1, 0]], "refused_switches": [[0, 1, 0]]}))
    assert violations(SMALL, Choice(0, (0, 1))) == ()
    assert len(violations(tight, Choice(0, (0, 1)))) == 2
    assert violations(tight, ONE_PHASE) == ()


def test_a_clock_of_a_hundredth_of_a_second_gives_no_answer_and_says_so() -> None:
    """The caller then keeps its heuristic plan."""
    answer = solve_instance(SMALL, "cpsat", 0.01, seed=0, incumbent=ONE_PHASE)
    assert answer.choice is None and answer.bound_s is None
    assert answer.stopped and not answer.infeasible


def test_a_solver_that_ignores_its_time_limit_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """HiGHS has sat in presolve for minutes; CBC is a program that the child starts and that must not outlive it."""
    pid_file = tmp_path / "pid"
    grandchild = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    )
    answer_with(monkeypatch, f"{grandchild}; open({str(pid_file)!r}, 'w').write(str(p.pid)); time.sleep(99)")
    started_s = time.monotonic()
    answer = solve_instance(SMALL, "cpsat", 2.0, seed=0)
    assert answer.choice is None
    assert time.monotonic() - started_s < 10
    for _ in range(100):
        if not is_running(int(pid_file.read_text())):
            return
        time.sleep(0.05)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    pytest.fail("the solver's own child outlived it")


def is_running(pid: int) -> bool:
    """Alive and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_an_instance_survives_its_json() -> None:
    """What the child solves is what the parent holds."""
    for instance in RANDOM[:30]:
        assert Instance.from_json(instance.to_json()) == instance
