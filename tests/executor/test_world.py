"""Which device a rank takes, and which road a tensor goes."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from executor import world
from executor.agreement import agree
from executor.checkpoint import Progress, load_checkpoint, save_checkpoint
from executor.data import MiniBatches
from executor.home import Home
from executor.metrics import gather_rows
from executor.optimizer import OptimizerOptions
from executor.step import Engine
from executor.storage import Storage
from executor.world import backend_of, expand_segments, join_world, take_device
from plans.corpus import open_corpus
from plans.errors import InputError
from plans.model import Precision
from tests.executor.test_step import mini_batch_of, reader
from tests.executor.tiny import LENGTHS, MODEL, make_documents
from tests.executor.tiny_plan import make_plan
from tests.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PLAN = make_plan(MODEL, [(1, 32, "dp2")], home="dp2")


def test_a_rank_takes_a_gpu_only_if_there_is_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks on one device; and the allocator must know its rules before its first use."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: done.append(f"device {place}"))
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    monkeypatch.setattr(world, "expand_segments", lambda _: done.append("segments"))
    assert take_device(2, 4) == CPU and done == []
    assert take_device(1, 2) == torch.device("cuda", 1) and done == ["segments", "device 1", "init"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert take_device(0, 1) == CPU
    assert (backend_of(CPU), backend_of(CUDA)) == ("gloo", "nccl")


def test_segments_are_expandable_unless_the_user_has_set_something() -> None:
    """Either name of the variable counts: two that disagree would leave it to chance which one holds."""
    environment: dict[str, str] = {}
    expand_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {name: "max_split_size_mb:128"}
        expand_segments(environment)
        assert environment == {name: "max_split_size_mb:128"}


def agree_beside_an_accelerator(rank: int, world_size: int, folder: Path) -> None:
    """In the world of a GPU, whose road for device tensors is a backend that delivers nothing."""
    import torch.testing._internal.distributed.fake_pg

    dist.barrier()
    dist.destroy_process_group()
    world.backend_of = lambda device: "fake"
    join_world(CUDA, rank, world_size, timedelta(seconds=20), init_method=f"file://{folder}/world")

    assert gather_rows([rank + 0.5, 7.0]).tolist() == [[0.5, 7.0], [1.5, 7.0]]
    agree("plans", "ab12")
    with pytest.raises(InputError, match=r"plans: ranks \[1\] have another one than rank 0"):
        agree("plans", f"ab1{rank}")

    home = Home(PLAN.home_layout, rank, PLAN.precision, 0, OptimizerOptions(), Storage(CPU))
    batches = MiniBatches(open_corpus([folder / "corpus.txt"]), PLAN.data, seed=0)
    progress = Progress.of(PLAN, home, batches, 3)
    saved = save_checkpoint(folder / "checkpoints", home, progress)
    kept = {name: master.clone() for name, master in home.masters.items()}
    for master in home.masters.values():
        master.zero_()
    load_checkpoint(saved, home, progress)
    assert all(torch.equal(home.masters[name], master) for name, master in kept.items())

    (folder / f"{rank} was here").touch()
    dist.barrier()
    assert all((folder / f"{other} was here").exists() for other in range(world_size))


def test_what_ranks_agree_on_and_account_for_never_takes_the_road_of_the_device(tmp_path: Path) -> None:
    """NCCL knows no CPU tensors, and what waits in a device's queue cannot say who is missing."""
    (tmp_path / "corpus.txt").write_text("some text")
    run_ranks(2, agree_beside_an_accelerator, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_rank_on_a_gpu_gives_the_gradients_of_the_cpu(tmp_path: Path) -> None:
    """In fp32, which a GPU may round otherwise: the whole road through NCCL's world, switches and the optimizer."""
    plan = make_plan(MODEL, [(10, 32, "dp1"), (1, 9, "dp1")], home="dp1", precision=Precision.fp32)
    documents, results = make_documents(LENGTHS), []
    for device in (CUDA, CPU):
        join_world(device, 0, 1, timedelta(seconds=60), init_method=f"file://{tmp_path}/{device.type}")
        engine = Engine(plan, seed=0, options=OptimizerOptions(), device=device, timeout_s=60)
        done = engine.accumulate(mini_batch_of(documents), reader(documents))
        results.append((done.loss, {name: gradient.cpu() for name, gradient in done.home.gradients.items()}))
        dist.destroy_process_group()
    (loss, found), (expected_loss, expected) = results
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)
