"""A training run: what `python -m executor` does on each rank.

read and judge the plan, open corpus and checkpoint  ─►  roll call of all ranks  ─►  step after step: train, evaluate,
write a line of metrics, write a checkpoint
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from executor.checkpoint import (
    FOLDER,
    Progress,
    find_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    set_aside,
)
from executor.data import MiniBatches
from executor.journal import Journal, require_free
from executor.kernels import compile_refusal
from executor.metrics import StepRecord
from executor.options import SHARED, RunOptions
from executor.prefetch import Prefetch
from executor.prepare import Prepared
from executor.recorder import Recorder, gather_spans
from executor.roll_call import call_the_roll
from executor.safetensors_read import Checkpoint
from executor.step import Engine
from executor.waits import waiting
from executor.world import join_world, take_device
from plans.check import require_sound
from plans.corpus import Corpus, open_corpus
from plans.errors import InputError
from plans.plan import Plan
from plans.plan_file import plan_digest, read_plan
from plans.trace import phase_name, write_trace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Inputs:
    plan: Plan
    mini_batches: MiniBatches
    evaluation: MiniBatches | None
    resumed: tuple[Path, Progress] | None
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
    device = take_device(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    try:
        inputs: _Inputs | InputError = _read(options, rank, world_size, device)
    except InputError as error:
        inputs = error
    call_the_roll(store, rank, world_size, inputs if isinstance(inputs, InputError) else inputs.digests, timeout)
    assert not isinstance(inputs, InputError)
    join_world(device, rank, world_size, timeout, store=store)
    _run(options, inputs, rank, device)
    with waiting("the last step of all ranks"):
        dist.barrier()  # nobody closes its connections while another may still read from them
    dist.destroy_process_group()


def _read(options: RunOptions, rank: int, world_size: int, device: torch.device) -> _Inputs:
    """Everything that can be refused."""
    if options.compile and (lacking := compile_refusal(device)):
        raise InputError(f"--compile: {lacking}; without it everything runs as well, only slower")
    plan = read_plan(options.plan)
    require_sound(plan, str(options.plan))
    if plan.cluster.num_ranks != world_size:
        raise InputError(
            f"{options.plan}: the plan is for {plan.cluster.num_ranks} ranks, this run has {world_size}; "
            f"start {plan.cluster.nodes} x --nproc-per-node {plan.cluster.ranks_per_node}, or solve for this machine"
        )
    if options.init_from is not None:
        with Checkpoint(options.init_from) as weights:
            weights.require(plan.model)
    resumed = None if options.resume is None else _resume(options, plan)
    if rank == 0 and not (resumed and _goes_on(options)):
        require_free(options.out)
    if rank == 0 and options.trace is not None and not options.trace.resolve().parent.is_dir():
        raise InputError(f"--trace {options.trace}: the folder {options.trace.parent} does not exist")
    corpus = _corpus(options, plan, options.data, "--data")
    mini_batches = MiniBatches(corpus, plan.data, options.seed, name="--data")
    if resumed is not None:
        folder, progress = resumed
        if progress.corpus != corpus.digest:
            raise InputError(f"--data: another corpus than that of {folder}; its place in it would mean nothing")
        mini_batches.restore(progress.data)
    told = repr([getattr(options, name) for name in SHARED])
    digests = {
        "plan": plan_digest(plan),
        "corpus": corpus.digest,
        "set of options": hashlib.sha256(told.encode()).hexdigest(),
        "checkpoint": "" if resumed is None else hashlib.sha256(repr(resumed[1]).encode()).hexdigest(),
    }
    evaluation = None
    if options.eval_data:
        held_out = _corpus(options, plan, options.eval_data, "--eval-data")
        evaluation = MiniBatches(held_out, plan.data, options.seed, name="--eval-data")
        digests["evaluation corpus"] = held_out.digest
    if rank == 0:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {options.out}: {error.strerror or error}") from None
    return _Inputs(plan, mini_batches, evaluation, resumed, digests)


def _corpus(options: RunOptions, plan: Plan, sources: tuple[Path, ...], option: str) -> Corpus:
    corpus = open_corpus(sources, options.tokenizer, options.text_field)
    if corpus.vocab_size > plan.model.vocab_size:
        raise InputError(
            f"{option}: token ids up to {corpus.vocab_size - 1}, but model {plan.model.name} of the plan has "
            f"vocab_size {plan.model.vocab_size}; take another tokenizer or a model with vocab_size {corpus.vocab_size}"
        )
    return corpus


def _resume(options: RunOptions, plan: Plan) -> tuple[Path, Progress]:
    assert options.resume is not None
    folder = find_checkpoint(options.resume)
    progress = open_checkpoint(folder, plan)
    if progress.step >= options.steps:
        raise InputError(f"--steps {options.steps}: {folder} has {progress.step} already; the least is one more")
    return folder, progress


def _goes_on(options: RunOptions) -> bool:
    """Whether the run that is resumed is the one in --out."""
    assert options.resume is not None
    out, resume = options.out.resolve(), options.resume.resolve()
    return resume in (out, out / FOLDER) or resume.parent == out / FOLDER


def _run(options: RunOptions, inputs: _Inputs, rank: int, device: torch.device) -> None:
    plan, mini_batches = inputs.plan, inputs.mini_batches
    engine = Engine(
        plan,
        seed=options.seed if options.init_from is None and inputs.resumed is None else None,
        options=options.optimizer,
        device=device,
        timeout_s=options.timeout_s,
        compile=options.compile,
    )
    done = 0
    if options.init_from is not None:
        engine.load_weights(options.init_from)
    if inputs.resumed is not None:
        folder, progress = inputs.resumed
        load_checkpoint(folder, engine.home, progress)
        done = progress.step
    if rank == 0:
        if inputs.resumed is not None and _goes_on(options):
            set_aside(options.out / FOLDER, behind=done)
        _introduce(plan, mini_batches)
        if inputs.resumed is not None:
            other = "" if progress.plan == inputs.digests["plan"] else ", which was made under another plan"
            log.info(f"resumed behind step {done} from {folder}{other}")
    steps = range(done + 1, options.steps + 1)

    def prepare(step: int) -> Prepared:
        return engine.prepare(mini_batches.step(step), mini_batches.tokens, mini_batches.labels)

    with (
        Journal(options.out, done=done) if rank == 0 else nullcontext() as journal,
        Prefetch(prepare, steps, timeout_s=options.timeout_s) as ahead,
    ):
        with waiting("the first step of all ranks"):
            dist.barrier()  # from here on the ranks' clocks count alike
        for step in steps:
            try:
                if options.trace is not None and step == options.steps:
                    record = _traced(engine, step, ahead.take, options.trace)
                else:
                    record = engine.run(step, ahead.take)
            except Exception as error:
                error.add_note(f"rank {rank}, step {step}")
                raise
            if inputs.evaluation is not None and options.evaluates(step):
                held_out = inputs.evaluation
                found = engine.evaluate(held_out.everything(), held_out.tokens, held_out.labels)
                record = replace(record, eval_loss=found.loss, eval_s=found.time_s)
            if journal is not None:
                log.info(record.text(options.steps))
                journal.write(record)
            if options.saves(step):
                saved = save_checkpoint(
                    options.out / FOLDER, engine.home, Progress.of(plan, engine.home, mini_batches, step)
                )
                if rank == 0:
                    log.info(f"saved {saved}")


def _traced(engine: Engine, step: int, take: Callable[[], Prepared], path: Path) -> StepRecord:
    """Train on one mini_batch and write what all ranks did when."""
    with waiting("the traced step of all ranks"):
        dist.barrier()
    recorder = Recorder(dist.get_rank(), engine.home.device)
    record = engine.run(step, take, recorder.record)
    spans = gather_spans(recorder.spans)
    if dist.get_rank() == 0:
        write_trace(path, spans)
        log.info(f"wrote {path}, a trace of step {step}; open it at ui.perfetto.dev")
    return record


def _introduce(plan: Plan, mini_batches: MiniBatches) -> None:
    phases = ", ".join(map(phase_name, plan.phases))
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
