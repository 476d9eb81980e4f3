"""What is made of a source once: text as ids, and the facts that take a pass over the whole of it.

Every process that needs it asks for it by a key. The first one makes it while the others wait; where they share no
folder, each machine makes its own. It appears whole or not at all, by a rename, and is never changed afterwards.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from plans.errors import InputError

VARIABLE = "HOTSPA_CACHE"
WAIT_S = 12 * 3600.0  # for another process that makes the same
_READ_WHOLE_BYTES = 2**26  # of larger files, size and time of change stand for the content
_PAUSE_S = 0.1


def cache_folder() -> Path:
    """$HOTSPA_CACHE, else `hotspa` in the user's cache."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotspa"


def cached(key: str, make: Callable[[Path], None], *, wait_s: float = WAIT_S) -> Path:
    """The folder of this key, in which `make` has written what belongs there.

    Raises:
        InputError: the cache cannot be written, or another process is still at it after `wait_s`.
    """
    folder = cache_folder() / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock"), wait_s):
            if not folder.is_dir():
                _make(folder, make)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written: {error.strerror or error}; set {VARIABLE} to a folder that can"
        ) from None
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    here = f"{folder.name}.{os.uname().nodename}."
    for left in folder.parent.glob(f"{here}*.tmp"):  # by makers on this machine that were killed
        if not _lives(left.name.removeprefix(here).removesuffix(".tmp")):
            shutil.rmtree(left, ignore_errors=True)
    begun = folder.parent / f"{here}{os.getpid()}.tmp"
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir()
    try:
        make(begun)
        try:
            begun.rename(folder)
        except OSError:
            if not folder.is_dir():  # else a machine that does not see our lock was faster
                raise
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # another user's
    return True


@contextlib.contextmanager
def _alone(path: Path, wait_s: float) -> Iterator[None]:
    """Holds a lock that its holder's end releases, whatever ends it."""
    deadline_s = time.monotonic() + wait_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise InputError(f"{path}: another process holds it for {wait_s:.0f} s already") from None
                time.sleep(_PAUSE_S)
            except OSError:
                break  # a file system without locks: several may do the same work, and the rename decides
        yield


def digest_of(what: str, files: Sequence[Path]) -> str:
    """A key: what is made, out of which files, as they are now.

    Raises:
        InputError: one of them cannot be read.
    """
    key = hashlib.sha256(f"hotspa cache 1 {what}".encode())
    for path in files:
        try:
            status = path.stat()
            if status.st_size > _READ_WHOLE_BYTES:
                key.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
            else:
                content = path.read_bytes()
                key.update(f"{path.suffix} {len(content)}\n".encode())
                key.update(content)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from None
    return key.hexdigest()[:32]
