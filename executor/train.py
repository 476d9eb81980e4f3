"""A training run: what `python -m executor` does on each rank.

read and judge the plan, open the corpus  ─►  roll call of all ranks  ─►  step after step, one line of metrics each
"""

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from executor.data import MiniBatches
from executor.home import OptimizerOptions
from executor.roll_call import call_the_roll
from executor.step import Engine
from executor.waits import waiting
from plans.check import require_sound
from plans.corpus import open_corpus
from plans.errors import InputError
from plans.plan import Plan
from plans.plan_file import plan_digest, read_plan

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run needs besides the plan."""

    plan: Path
    data: tuple[Path, ...]
    """Sources of the corpus, see plans.corpus."""
    steps: int
    """Optimizer steps, at least 1."""
    out: Path
    """Folder for metrics.jsonl, which is never overwritten."""
    seed: int = 0
    """Of initial weights and order of documents, at least 0."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    text_field: str = "text"
    """Field of a jsonl line that holds the text."""
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    timeout_s: float = 600.0
    """Limit of every wait for another rank; more than a rank computes between two messages."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.seed < 0 or not 0 < self.timeout_s < math.inf:
            raise InputError(
                f"--steps {self.steps}, --seed {self.seed}, --timeout-s {self.timeout_s}: "
                "the least legal values are 1, 0 and above 0"
            )


@dataclass(frozen=True, slots=True)
class _Inputs:
    plan: Plan
    mini_batches: MiniBatches
    digests: Mapping[str, str]


def train(options: RunOptions) -> None:
    """Run all steps on this rank, which finds the others as torchrun leaves it in the environment.

    Raises:
        InputError: plan, corpus or options cannot be used; every rank raises the same, before any communication.
        WaitError: another rank failed or was silent for too long.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise InputError(f"{options.plan}: a run has one process per rank; start it with torchrun, or as `hotspa run`")
    timeout = timedelta(seconds=options.timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    try:
        inputs: _Inputs | InputError = _read(options, rank, world_size)
    except InputError as error:
        inputs = error
    call_the_roll(store, rank, world_size, inputs if isinstance(inputs, InputError) else inputs.digests, timeout)
    assert not isinstance(inputs, InputError)
    device, backend = _device()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _run(options, inputs, rank, device)
    with waiting("the last step of all ranks"):
        dist.barrier()  # nobody closes its connections while another may still read from them
    dist.destroy_process_group()


def _read(options: RunOptions, rank: int, world_size: int) -> _Inputs:
    """Everything that can be refused."""
    plan = read_plan(options.plan)
    require_sound(plan, str(options.plan))
    if plan.cluster.num_ranks != world_size:
        raise InputError(
            f"{options.plan}: the plan is for {plan.cluster.num_ranks} ranks, this run has {world_size}; "
            f"start {plan.cluster.nodes} x --nproc-per-node {plan.cluster.ranks_per_node}, or solve for this machine"
        )
    if any(kind.cp > 1 for layout in plan.layouts for kind in layout.strategy.kinds):
        raise InputError(f"{options.plan}: context parallelism (cp > 1) can be planned but not run yet; use cp 1")
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out}: is a file; name a folder")
    if rank == 0 and (options.out / METRICS).exists():
        raise InputError(f"--out {options.out}: {METRICS} of another run is there; choose another folder or remove it")
    corpus = open_corpus(options.data, options.tokenizer, options.text_field)
    if corpus.vocab_size > plan.model.vocab_size:
        raise InputError(
            f"--data: token ids up to {corpus.vocab_size - 1}, but model {plan.model.name} of the plan has "
            f"vocab_size {plan.model.vocab_size}; take another tokenizer or a model with vocab_size {corpus.vocab_size}"
        )
    told = repr((options.steps, options.seed, options.optimizer))
    digests = {
        "plan": plan_digest(plan),
        "corpus": corpus.digest,
        "set of options": hashlib.sha256(told.encode()).hexdigest(),
    }
    inputs = _Inputs(plan, MiniBatches(corpus, plan.data, options.seed), digests)
    if rank == 0:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {options.out}: {error.strerror or error}") from None
    return inputs


def _device() -> tuple[torch.device, str]:
    """Where this rank computes, and how it communicates: CPU tensors (small, for agreement) go through gloo always."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
    return torch.device("cpu"), "gloo"


def _run(options: RunOptions, inputs: _Inputs, rank: int, device: torch.device) -> None:
    plan, mini_batches = inputs.plan, inputs.mini_batches
    engine = Engine(plan, seed=options.seed, options=options.optimizer, device=device, timeout_s=options.timeout_s)
    with ExitStack() as stack:
        metrics = None
        if rank == 0:
            _introduce(plan, mini_batches)
            metrics = stack.enter_context((options.out / METRICS).open("x", encoding="utf-8"))
        with waiting("the first step of all ranks"):
            dist.barrier()  # from here on the ranks' clocks count alike
        for step in range(1, options.steps + 1):
            try:
                record = engine.step(step, mini_batches.step(step), mini_batches.tokens)
            except Exception as error:
                error.add_note(f"rank {rank}, step {step}")
                raise
            if metrics is not None:
                log.info(record.text(options.steps))
                metrics.write(record.json_line())
                metrics.flush()


def _introduce(plan: Plan, mini_batches: MiniBatches) -> None:
    phases = ", ".join(f"{p.min_len}..{p.max_len} {p.division.strategy}" for p in plan.phases)
    log.info(
        f"{plan.model.name}: {plan.model.num_parameters / 1e6:,.1f} M parameters in {plan.precision} on "
        f"{plan.cluster.num_ranks} ranks, {plan.data.sequences} sequences a step; {phases}; home {plan.home.strategy}"
    )
    if mini_batches.lengths_digest != plan.fingerprints.lengths:
        log.warning("warning: the plan was made for other lengths than this corpus has; its predictions may be far off")
    counts = mini_batches.counts
    if counts.truncated_sequences or counts.skipped_sequences:
        log.info(
            f"over {plan.data.max_len} tokens: {counts.truncated_sequences} sequences truncated by "
            f"{counts.truncated_tokens} tokens, {counts.skipped_sequences} with {counts.skipped_tokens} skipped"
        )
