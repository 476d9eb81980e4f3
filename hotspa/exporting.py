"""`hotspa export`: trained weights as a Hugging Face folder."""

import logging
import warnings
from pathlib import Path

from hotspa.reports import print_json, progress
from plans.model import Precision


def export(place: Path, output: Path, precision: Precision | None, like: Path | None, *, as_json: bool) -> None:
    """Write a checkpoint, or the newest of a run's folder, and say what was written."""
    from executor.export import export_checkpoint

    # One process reads what many wrote: that is meant, whatever torch.distributed thinks of it.
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    with progress("exporting"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        model = export_checkpoint(place, output, precision, like=like)
    files = sorted(path.name for path in output.iterdir())
    if as_json:
        print_json({"model": model.name, "parameters": model.num_parameters, "folder": str(output), "files": files})
    else:
        print(f"{output}: {model.name}, {model.num_parameters / 1e6:,.1f} M parameters; {', '.join(files)}")
