"""`hotspa run`: torchrun with one local rank per rank of the plan."""

import os
from collections.abc import Sequence
from pathlib import Path

from plans.check import require_sound
from plans.errors import InputError
from plans.plan_file import read_plan


def launch(plan_file: Path, data: Sequence[Path], steps: int, out: Path, options: Sequence[str]) -> int:
    """Run the executor on this machine and return its exit code.

    Raises:
        InputError: the plan is unsound or spans several nodes; found before any process starts.
    """
    plan = read_plan(plan_file)
    require_sound(plan, str(plan_file))
    if plan.cluster.nodes > 1:
        raise InputError(
            f"{plan_file}: the plan is for {plan.cluster.nodes} nodes; on each of them run `torchrun --nnodes "
            f"{plan.cluster.nodes} --nproc-per-node {plan.cluster.ranks_per_node} -m executor {plan_file} ...`"
        )
    arguments = ["--standalone", "--nproc-per-node", str(plan.cluster.num_ranks), "-m", "executor", str(plan_file)]
    for source in data:
        arguments += ["--data", str(source)]
    return _torchrun([*arguments, "--steps", str(steps), "--out", str(out), *options])


def one_pass(plan_file: Path, data: Sequence[Path], tokenizer: str, field: str) -> int:
    """Steps in which every sequence of the corpus comes once; the last one begins the next pass where it must."""
    from plans.corpus import open_corpus
    from plans.lengths import Lengths

    rules = read_plan(plan_file).data
    taken, _ = Lengths.of(str(data[0]), open_corpus(data, tokenizer, field).lengths).limit(
        rules.max_len, rules.overlong
    )
    return -(-int(taken.counts.sum()) // rules.sequences)


def _torchrun(arguments: list[str]) -> int:
    """torchrun in this process, so that the exit code of the rank that failed first is ours."""
    # Variable lengths fragment the accelerator's allocator; one thread per rank, since ranks share the cores.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # The ranks say what is wrong; torchrun's report of their exit codes would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
