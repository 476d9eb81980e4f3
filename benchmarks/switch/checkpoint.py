"""torch.distributed.checkpoint: every shard is written to a RAM disk, once, and read into other shards."""

import warnings
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.switch.case import Case, Weights
from executor.shards import LoadPlanner, SavePlanner

_KEY = "weight."


class Checkpoint:
    def __init__(self, case: Case, folder: Path) -> None:
        """`folder` is the same on all ranks."""
        self._case, self._folder = case, folder
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # it is written again and again

    def run(self) -> Weights:
        case, model = self._case, self._case.source.model
        save(
            {_KEY + name: tensor for name, tensor in case.old.items()},
            storage_writer=FileSystemWriter(self._folder, sync_files=False),
            planner=SavePlanner(model, case.source.boxes[case.rank]),
        )
        load(
            {_KEY + name: tensor for name, tensor in case.new.items()},
            storage_reader=FileSystemReader(self._folder),
            planner=LoadPlanner(case.target.boxes[case.rank]),
        )
        return case.new
