"""Datasets of Hugging Face: folders that `datasets.Dataset.save_to_disk` writes (Arrow streams, named by state.json),
and Parquet as downloads from the hub come, a file or a folder of one split's files.

Needs pyarrow, which the extra `hf` brings. Columns mean what the fields of a line of JSON mean, see plans.documents.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plans.documents import given_ids
from plans.encoder import Encoder, Piece
from plans.errors import InputError
from plans.files import read_text
from plans.shard import Int64s

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_PARQUET = ".parquet"
_ROWS_AT_ONCE = 1024  # of a Parquet file, whose own groups may be as large as the file


def is_dataset(source: Path) -> bool:
    """Whether `save_to_disk` wrote it, or it is Parquet."""
    if source.suffix == _PARQUET:
        return True
    return any((source / name).is_file() for name in (_STATE, _SPLITS)) or any(source.glob(f"*{_PARQUET}"))


def dataset_files(source: Path) -> list[Path]:
    """Its files, in their order.

    Raises:
        InputError: pyarrow is missing, or the folder holds several splits, or no files.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InputError(f"{source}: a Hugging Face dataset; install the extra: pip install 'hotspa[hf]'") from None
    if source.is_file():
        return [source]
    if any((source / name).is_file() for name in (_STATE, _SPLITS)):
        return _saved_files(source)
    files = sorted(source.glob(f"*{_PARQUET}"))
    splits = sorted({path.stem.partition("-")[0] for path in files})  # train-00000-of-00002.parquet
    if len(splits) > 1:
        raise InputError(f"{source}: holds {', '.join(splits)}; name the files of one of them, or move them apart")
    return files


def _saved_files(folder: Path) -> list[Path]:
    if (folder / _SPLITS).is_file():
        splits = _json(folder / _SPLITS).get("splits", [])
        raise InputError(f"{folder}: holds several splits; name one of {', '.join(str(folder / s) for s in splits)}")
    try:
        files = [folder / entry["filename"] for entry in _json(folder / _STATE)["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"{folder / _STATE}: names no '_data_files'") from None
    if not files:
        raise InputError(f"{folder / _STATE}: names no '_data_files'")
    return files


def read_dataset(files: list[Path], encoder: Encoder, field: str) -> Iterator[Piece]:
    """A document a row. Raises InputError: a file or a row that is none, with its number from 0."""
    import pyarrow as pa

    for path in files:
        first = 0
        try:
            for batch in _batches(path):
                yield from _read(batch, f"{path}: rows {first}..{first + len(batch) - 1}", encoder, field)
                first += len(batch)
        except (pa.ArrowException, OSError) as error:
            what = "a Parquet file" if path.suffix == _PARQUET else "an Arrow stream"
            raise InputError(f"{path}: not {what}: {error}") from None


def _batches(path: Path) -> Iterator[Any]:
    """Record batches of one file."""
    import pyarrow as pa

    if path.suffix == _PARQUET:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE)
    else:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
            yield from stream


def _read(batch: Any, place: str, encoder: Encoder, field: str) -> Iterator[Piece]:
    names = batch.schema.names
    if "input_ids" in names:
        ids, counts = _lists(batch, "input_ids", place)
        beside = {}
        for name in ("labels", "loss_mask"):
            if name in names:
                beside[name], other = _lists(batch, name, place)
                if not np.array_equal(counts, other):
                    row = int(np.argmax(counts != other))
                    raise InputError(f"{place}: row {row} of them has {other[row]} {name} for {counts[row]} input_ids")
        yield given_ids(ids, counts, beside.get("labels"), beside.get("loss_mask"), encoder, place)
    elif field in names:
        texts = batch.column(field).to_pylist()
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{place}: column {field!r} holds something else than text")
        yield from encoder.encode(text.encode(errors="surrogatepass") for text in texts)
    else:
        raise InputError(
            f"{place}: neither text under {field!r} nor ids under 'input_ids'; columns: {', '.join(names)}"
        )


def _lists(batch: Any, name: str, place: str) -> tuple[Int64s, Int64s]:
    """The entries of a column of lists end to end, and the number in each row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = batch.column(name)
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    integers = lists and (pa.types.is_integer(column.type.value_type) or pa.types.is_boolean(column.type.value_type))
    if not integers or column.null_count or column.flatten().null_count:
        raise InputError(f"{place}: column {name!r} of {column.type} is no column of lists of integers without nulls")
    entries = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    if entries.size and (entries.min() < -(2**31) or entries.max() >= 2**31):
        raise InputError(f"{place}: column {name!r} holds integers beyond 2^31")
    return entries, pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object")
    return content
