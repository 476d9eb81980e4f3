"""Running a plan: ranks, model, pipeline, hot switch, optimizer, measuring. Meets the planner in a plan file only.

What a training loop of one's own needs is here by name; docs/python.md shows one.
"""

from executor.checkpoint import Progress, find_checkpoint, load_checkpoint, open_checkpoint, save_checkpoint
from executor.data import MiniBatch, MiniBatches
from executor.evaluation import Evaluation
from executor.metrics import StepRecord
from executor.optimizer import OptimizerOptions
from executor.reshard import reshard
from executor.shard_spec import ShardSpec
from executor.step import Engine

__all__ = [
    "Engine",
    "Evaluation",
    "MiniBatch",
    "MiniBatches",
    "OptimizerOptions",
    "Progress",
    "ShardSpec",
    "StepRecord",
    "find_checkpoint",
    "load_checkpoint",
    "open_checkpoint",
    "reshard",
    "save_checkpoint",
]
