"""What a training run is told besides its plan."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from executor.optimizer import OptimizerOptions
from plans.errors import InputError

SHARED = ("steps", "seed", "optimizer", "eval_every", "checkpoint_every", "compile", "trace")
"""Options that must be the same on all ranks; paths may differ where machines do, what they lead to is compared."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run needs besides the plan."""

    plan: Path
    data: tuple[Path, ...]
    """Sources of the corpus, see plans.corpus."""
    steps: int
    """Optimizer steps, at least 1."""
    out: Path
    """Folder for metrics.jsonl, which is never overwritten, curves and checkpoints."""
    seed: int = 0
    """Of initial weights and order of documents, at least 0."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    text_field: str = "text"
    """Field of a jsonl line that holds the text."""
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    eval_data: tuple[Path, ...] = ()
    """Sources of the documents to evaluate on: all of them, each time."""
    eval_every: int = 0
    """Steps between evaluations; 0: only after the last step. There is one after the last step always."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: never. Otherwise there is one after the last step too."""
    init_from: Path | None = None
    """Hugging Face folder with the initial weights; by default they are random."""
    resume: Path | None = None
    """A checkpoint, or the folder of a run whose newest one is meant."""
    trace: Path | None = None
    """File for a trace of the last step, see plans.trace."""
    compile: bool = False
    """Compile the elementwise parts of layers, see executor.kernels."""
    timeout_s: float = 600.0
    """Limit of every wait for another rank; more than a rank computes between two messages, or writes."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.seed < 0 or not 0 < self.timeout_s < math.inf:
            raise InputError(
                f"--steps {self.steps}, --seed {self.seed}, --timeout-s {self.timeout_s}: "
                "the least legal values are 1, 0 and above 0"
            )
        for name, every in (("eval", self.eval_every), ("checkpoint", self.checkpoint_every)):
            if every < 0:
                raise InputError(f"--{name}-every {every}: the least is 0, which is never")
        if self.eval_every and not self.eval_data:
            raise InputError(f"--eval-every {self.eval_every}: give --eval-data too")
        if self.resume is not None and self.init_from is not None:
            raise InputError(f"--init-from {self.init_from}: the weights of --resume would replace these; give one")

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        return bool(self.eval_data) and self._due(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Whether there is a checkpoint after a step."""
        return self.checkpoint_every > 0 and self._due(step, self.checkpoint_every)

    def _due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)
