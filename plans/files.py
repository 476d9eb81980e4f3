"""Files as text, lines, JSON rows and arrays; whatever cannot be read or written is an InputError with its place."""

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plans.errors import InputError


def read_text(path: str | Path) -> str:
    """The text of a file. Raises InputError: it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, unpacked where it ends in .gz. Raises InputError: it cannot be read."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: not a sound .gz file: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file one by one, unpacked where it ends in .gz. Raises InputError: it cannot be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: not a sound .gz file: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Every object of a .jsonl(.gz) with its place, `file:line`; empty lines are passed over."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: not a JSON object")
        yield f"{path}:{number}", row


def read_array(path: Path, *, mmap: bool = False) -> npt.NDArray[np.integer]:
    """A one-dimensional array of integers from a .npy file. Raises InputError: it is not one."""
    try:
        array: npt.NDArray[np.integer] = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: not a .npy file: {str(error).splitlines()[0]}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{path}: {array.ndim} dims of {array.dtype}; one dim of integers expected")
    return array


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then renamed.

    Raises:
        InputError: it cannot be written; what was there before is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
