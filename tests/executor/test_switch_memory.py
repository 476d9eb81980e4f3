"""What a switch takes of a rank's memory, and what it leaves alone."""

import os
import signal
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from executor.backbone import Holding
from executor.heap import Heap
from executor.local import RankError as LocalRankError
from executor.local import Tell, run_local
from executor.storage import Storage
from executor.switch import Switcher
from plans.layout import Layout, home_layout, layout
from plans.memory import kept_numels
from plans.model import ModelSpec, Precision
from plans.strategy import Strategy
from tests.ranks import run_ranks

STRATEGIES = ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2")
CHUNK = 2**15  # bytes; a layout has a hundred times as many
CPU = torch.device("cpu")
MODEL = ModelSpec(
    name="memory", num_layers=5, hidden_size=120, ffn_size=330, num_heads=4, num_kv_heads=4, vocab_size=550
)


def place(text: str) -> Layout:
    return layout(MODEL, Strategy.parse(text))


def masters(home: Layout, rank: int, storage: Storage) -> Holding:
    """Of ones."""
    shapes = {name: (box.rows,) if "norm" in name else (box.rows, box.cols) for name, box in home.boxes[rank].items()}
    return Holding({name: storage.empty(shape, torch.float32).fill_(1) for name, shape in shapes.items()})


def go_everywhere(rank: int, world_size: int) -> tuple[int, int]:
    """Home to every pair of strategies and back; pages that were ever touched, and the bytes that are promised."""
    switcher = Switcher(Precision.fp32, 2, CHUNK, CPU)
    home = home_layout(MODEL, Strategy.parse("tp2pp2"))
    at_home = masters(home, rank, switcher.storage)
    most = 0
    for pair in list(permutations(STRATEGIES, 2))[::2]:
        held = Holding(dict(at_home.weights))
        for source, target in pairwise((home, *map(place, pair), home)):
            held = switcher.run(source, target, held)
            both = source.numels[rank] + target.numels[rank] - kept_numels(source, target)[rank]
            most = max(most, 8 * both)
        del held
    return switcher.storage.resident_bytes, most + 4 * home.numels[rank] + 2 * CHUNK * (world_size - 1)


def test_a_switch_takes_both_layouts_and_two_chunks_per_peer() -> None:
    """More than the memory model says is a run that dies in the middle. Two ranks a node: both roads."""
    for resident, promised in run_ranks(4, go_everywhere):
        assert promised / 2 < resident <= promised


def switch_again(rank: int, world_size: int) -> tuple[int, int, int]:
    """Two steps, and a third: bytes that torch allocates, pages that the storage grows by, switches worked out."""
    switcher = Switcher(Precision.fp32, 2, CHUNK, CPU)
    home = home_layout(MODEL, Strategy.parse("tp2pp2"))
    at_home = masters(home, rank, switcher.storage)
    road = (home, *map(place, ("dp4", "tp2pp2", "tp4")), home)

    def step() -> None:
        held = Holding(dict(at_home.weights))
        for source, target in pairwise(road):
            held = switcher.run(source, target, held)

    step()
    step()
    before, worked_out = switcher.storage.resident_bytes, len(switcher._exchanges)
    switcher.prepare = lambda *ends: switcher._exchanges[ends]  # type: ignore[method-assign]
    with profile(profile_memory=True) as seen:
        step()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in seen.function_events or ())
    return allocated, switcher.storage.resident_bytes - before, len(switcher._exchanges) - worked_out


def test_a_switch_that_ran_before_allocates_and_plans_nothing() -> None:
    """A fresh page costs more than what is copied into it, and every rank waits for the one that plans. Both roads."""
    assert run_ranks(4, switch_again) == [(0, 0, 0)] * 4


def die_in_between(tell: Tell, folder: str, share: bool) -> None:
    """Rank 1 is killed between the start and the end of a switch; the others write down what they see."""
    rank = dist.get_rank()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who started the ranks ends them as soon as one is dead
    switcher = Switcher(Precision.fp32, 4, CHUNK, CPU, share=share)
    home = home_layout(MODEL, Strategy.parse("tp2pp2"))
    if rank == 1:
        switcher._run_turn = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        switcher.run(home, place("dp4"), masters(home, rank, switcher.storage))
    except Exception as error:
        Path(folder, str(rank)).write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize("share", [True, False])
def test_a_peer_that_dies_in_mid_switch_ends_all_ranks_and_is_named(share: bool, tmp_path: Path) -> None:
    """Nobody finds the machine that failed without the rank, the switch and the bytes. Long before the limit."""
    with pytest.raises(LocalRankError, match="rank 1 died"):
        run_local(4, die_in_between, str(tmp_path), share, silence_s=60, on_message=print)
    said = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(said) == 3
    assert any("rank 1" in line and "MiB" in line and "switch home -> dp4" in line for line in said), said


def test_the_heap_gives_the_same_places_again() -> None:
    """Peers look where a tensor was in the last step; holes that join hold what is larger than either."""
    heap = Heap(1024)
    places = [heap.take(size) for size in (100, 64, 200)]
    assert places == [0, 128, 192]
    heap.give(0, 100)
    heap.give(128, 64)
    assert heap.take(192) == 0
    with pytest.raises(MemoryError, match="1000 bytes"):
        heap.take(1000)
    heap.give(0, 192)
    heap.give(192, 200)
    assert list(heap.free()) == [(0, 1024)]


def test_pages_go_back_to_the_system_when_they_are_trimmed() -> None:
    """Where memory is short, activations need what a switch has left."""
    storage = Storage(CPU)
    kept, freed = (storage.empty((2**20,), torch.uint8).fill_(value) for value in (1, 2))
    assert storage.resident_bytes == 2 * 2**20
    del freed
    assert storage.resident_bytes == 2 * 2**20
    storage.trim()
    assert storage.resident_bytes == 2**20
    assert bool((kept == 1).all())
