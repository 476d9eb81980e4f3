"""Files as text, lines, JSON rows and arrays; whatever cannot be read or written is an InputError with its place."""

import contextlib
import gzip
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from plans.errors import InputError


def read_text(path: str | Path) -> str:
    """The text of a file. Raises InputError: it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from None
    except (OSError, ValueError) as error:
        raise InputError(_why(path, error)) from None


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, unpacked where it ends in .gz. Raises InputError: it cannot be read."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: not a sound .gz file: {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(_why(path, error)) from None


def _why(path: str | Path, error: Exception) -> str:
    """One line; a ValueError is for a path that cannot be one, with a NUL in it."""
    return f"{str(path)!r}: {error}" if isinstance(error, ValueError) else f"{path}: {_reason(error)}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


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
        except RecursionError:
            raise InputError(f"{path}:{number}: nested too deeply") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: not a JSON object")
        yield f"{path}:{number}", row


def read_array(path: Path, *, mmap: bool = False) -> npt.NDArray[np.integer]:
    """A one-dimensional array of integers from a .npy file. Raises InputError: it is not one."""
    try:
        with path.open("rb") as file:
            shape, dtype = _npy_head(file)
            held = os.fstat(file.fileno()).st_size - file.tell()
        if (count := math.prod(shape)) * dtype.itemsize > held:
            raise InputError(f"{path}: not a .npy file: {held} bytes do not hold {count} items of {dtype}")
        array: npt.NDArray[np.integer] = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: {_reason(error)}") from None
    except Exception as error:  # a head is a Python literal: what it can raise is not told
        why = " ".join(str(error).splitlines()[:1]) or type(error).__name__
        raise InputError(f"{path}: not a .npy file: {why}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{path}: {array.ndim} dims of {array.dtype}; one dim of integers expected")
    return array


def _npy_head(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and type of the items; what follows in the file are the items themselves."""
    version = npy.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(file)
    else:
        shape, _, dtype = npy.read_array_header_2_0(file)
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape} is negative")
    return shape, dtype


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then renamed.

    A link is followed, a file keeps its mode, and what is no file, like a pipe or /dev/null, is written in place.

    Raises:
        InputError: it cannot be written; what was there before is untouched.
    """
    temporary: Path | None = None
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise InputError(f"{str(path)!r}: cannot be written: it is a folder")
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            target.write_bytes(content)
            return
        temporary = target.with_name(f".{target.name[:40]}.{os.getpid()}.tmp")
        with temporary.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name, a circle of links
        shown = path if isinstance(error, OSError) else repr(str(path))
        raise InputError(f"{shown}: cannot be written: {_reason(error)}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
