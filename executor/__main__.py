"""`torchrun --nproc-per-node N -m executor PLAN --data DATA --steps N --out DIR`: one rank of a training run."""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from executor.allocator import keep_freed_memory
from executor.checkpoint import CheckpointError
from executor.optimizer import LR_SCHEDULES, OptimizerOptions
from executor.options import RunOptions
from executor.train import train
from executor.waits import WaitError
from plans.errors import InputError

_EXAMPLE = "example: torchrun --nproc-per-node 4 -m executor plan.yaml --data corpus.jsonl --steps 20 --out runs/first"

_HERE = object()  # of --resume without a folder


def main() -> None:
    """Input that cannot be used ends the process with one line and exit code 2, anything else with exit code 1.

    torchrun itself ends with 1 whatever its processes end with; `hotspa run` passes the code on.
    """
    arguments = _parser().parse_args()
    rank = int(os.environ.get("RANK", "0"))
    _end_with_parent()
    keep_freed_memory()
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(message)s" if rank == 0 else f"rank {rank}: %(message)s",
        stream=sys.stdout,
    )
    try:
        if arguments.threads < 1:
            raise InputError(f"--threads {arguments.threads}: the least legal value is 1")
        torch.set_num_threads(arguments.threads)
        train(_options(arguments))
    except InputError as error:
        if rank:
            time.sleep(0.5)  # every rank raises the same; torchrun ends all when one ends, so the first speaks first
        else:
            print(f"executor: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except (WaitError, CheckpointError) as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"executor: {error}{notes}", file=sys.stderr, flush=True)
        raise


def _end_with_parent() -> None:
    """Ask Linux to end this rank when its launcher dies without a word: nobody else would."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _parser() -> argparse.ArgumentParser:
    default = OptimizerOptions()
    parser = argparse.ArgumentParser(prog="python -m executor", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("plan", type=Path, help="plan file")
    parser.add_argument(
        "--data", type=Path, action="append", nargs="+", required=True, help="folders, text, .jsonl(.gz), .parquet, ids"
    )
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps")
    parser.add_argument("--out", type=Path, required=True, help="folder for metrics.jsonl and checkpoints")
    parser.add_argument("--tokenizer", default="bytes", help="`bytes` or a tokenizer.json (%(default)s)")
    parser.add_argument("--field", default="text", help="field of a jsonl line that holds the text (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and order of documents (%(default)s)")
    parser.add_argument("--lr", type=float, default=default.lr, help="peak learning rate (%(default)s)")
    parser.add_argument("--min-lr", type=float, default=default.min_lr, help="where the schedule leads (%(default)s)")
    parser.add_argument(
        "--lr-schedule", choices=LR_SCHEDULES, default=default.lr_schedule, help="behind the warm-up (%(default)s)"
    )
    parser.add_argument("--warmup-steps", type=int, default=default.warmup_steps, help="linear warm-up (%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=default.weight_decay, help="of matrices (%(default)s)")
    parser.add_argument("--beta1", type=float, default=default.beta1, help="of Adam's mean (%(default)s)")
    parser.add_argument("--beta2", type=float, default=default.beta2, help="of Adam's mean square (%(default)s)")
    parser.add_argument("--eps", type=float, default=default.eps, help="of Adam (%(default)s)")
    parser.add_argument("--clip", type=float, default=default.clip, help="largest gradient norm (%(default)s)")
    parser.add_argument("--eval-data", type=Path, action="append", nargs="+", default=[], help="held-out documents")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; 0: after the last only")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--init-from", type=Path, help="Hugging Face folder with the initial weights")
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=_HERE,
        help="go on from a checkpoint, or the newest of a run's folder; --out if none is named",
    )
    parser.add_argument("--trace", type=Path, help="file for a trace of the last step, for ui.perfetto.dev")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="limit of a wait for another rank (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile what lies between products and exchanges")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (%(default)s)")
    return parser


def _options(arguments: argparse.Namespace) -> RunOptions:
    return RunOptions(
        plan=arguments.plan,
        data=tuple(source for group in arguments.data for source in group),
        steps=arguments.steps,
        out=arguments.out,
        seed=arguments.seed,
        tokenizer=arguments.tokenizer,
        text_field=arguments.field,
        optimizer=OptimizerOptions(
            lr=arguments.lr,
            min_lr=arguments.min_lr,
            lr_schedule=arguments.lr_schedule,
            warmup_steps=arguments.warmup_steps,
            total_steps=arguments.steps,
            weight_decay=arguments.weight_decay,
            beta1=arguments.beta1,
            beta2=arguments.beta2,
            eps=arguments.eps,
            clip=arguments.clip,
        ),
        eval_data=tuple(source for group in arguments.eval_data for source in group),
        eval_every=arguments.eval_every,
        checkpoint_every=arguments.checkpoint_every,
        init_from=arguments.init_from,
        resume=arguments.out if arguments.resume is _HERE else arguments.resume,
        trace=arguments.trace,
        compile=arguments.compile,
        timeout_s=arguments.timeout_s,
    )


if __name__ == "__main__":
    record(main)()
