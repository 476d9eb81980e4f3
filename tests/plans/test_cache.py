"""What is made once: by one process while others wait, whole or not at all."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from plans.cache import cache_folder, cached, digest_of
from plans.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSPA_CACHE", str(tmp_path / "cache"))
    return tmp_path


def slow(folder: Path) -> None:
    time.sleep(0.5)
    (folder / "maker").write_text(str(os.getpid()))


def ask(key: str) -> str:
    return (cached(key, slow) / "maker").read_text()


def test_of_many_processes_one_makes_it() -> None:
    """Ranks that tokenize the same corpus at the same time would take as many times the work."""
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(ask, ["key"] * 4, chunksize=1))) == 1
    assert sorted(path.name for path in cache_folder().iterdir()) == ["key", "key.lock"]


def test_what_failed_is_not_there_and_can_be_made_again() -> None:
    """Half a corpus must never be taken for one."""

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise InputError("rows.jsonl:2: not JSON")

    with pytest.raises(InputError, match=r"rows.jsonl:2"):
        cached("key", fail)
    assert [path.name for path in cache_folder().iterdir()] == ["key.lock"]
    assert ask("key") == str(os.getpid())


def hold(folder: Path) -> None:
    """Another asks for what is being made here."""
    with pytest.raises(InputError, match="another process holds it for 0 s already"):
        cached("key", slow, wait_s=0.2)


def test_what_a_killed_maker_left_is_removed_and_what_another_makes_is_not() -> None:
    """A corpus of some hundred GB, half written at every crash, would fill the disk."""
    cache_folder().mkdir()
    ended = multiprocessing.get_context("spawn").Process()
    ended.start()
    ended.join()
    left, foreign, running = (
        cache_folder() / f"key.{node}.{pid}.tmp"
        for node, pid in (
            (os.uname().nodename, ended.pid),
            ("elsewhere", ended.pid),
            (os.uname().nodename, os.getppid()),
        )
    )
    for each in (left, foreign, running):
        each.mkdir()
    assert ask("key") == str(os.getpid())
    assert not left.exists() and foreign.exists() and running.exists()


def test_the_wait_for_another_process_ends() -> None:
    """A process that hangs must not hang all others for good."""
    cached("key", hold)


def test_a_cache_that_cannot_be_written_is_refused_with_the_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home folders are not writable everywhere."""
    (folder / "file").touch()
    monkeypatch.setenv("HOTSPA_CACHE", str(folder / "file"))
    with pytest.raises(InputError, match=r"cannot be written: .*; set HOTSPA_CACHE to a folder that can"):
        ask("key")
    monkeypatch.delenv("HOTSPA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/hotspa")


def test_the_key_changes_with_the_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited corpus is another one, also where its size and time stay the same."""
    path = folder / "a.txt"
    path.write_text("one")
    times = path.stat()
    first = digest_of("texts", [path])
    assert digest_of("texts", [path]) == first != digest_of("rows", [path])
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest_of("texts", [path]) != first
    monkeypatch.setattr("plans.cache._READ_WHOLE_BYTES", 1)
    large = digest_of("texts", [path])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert digest_of("texts", [path]) != large
