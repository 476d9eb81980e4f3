"""A run that is interrupted and resumed, under any plan and any number of ranks, is the run that was not."""

import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from executor.checkpoint import (
    CheckpointError,
    Progress,
    find_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    set_aside,
)
from executor.optimizer import OptimizerOptions
from executor.shards import require_whole
from executor.step import Engine
from plans.errors import InputError
from plans.plan import Plan
from plans.plan_file import plan_digest
from tests.builders import DIGEST
from tests.executor.test_step import mini_batch_of, phases, reader
from tests.executor.tiny import LENGTHS, MODEL, make_documents, make_weights, sum_of_partials
from tests.executor.tiny_plan import make_plan
from tests.ranks import RankError, run_ranks

OPTIONS = OptimizerOptions(lr=1e-2, warmup_steps=4, weight_decay=0.1, clip=0.5)
PLAN = make_plan(MODEL, phases("tp2pp2", "dp4"), home="dp2tp2")
OTHERS = {
    "another plan": make_plan(MODEL, phases("dp2pp2", "tp4"), home="pp4"),
    "two ranks": make_plan(MODEL, phases("pp2", "dp2"), home="dp2"),
    "one rank": make_plan(MODEL, phases("dp1"), home="dp1"),
}
LAST = 4  # steps of the run; the checkpoint is written after the second
State = dict[str, Tensor]


def engine_of(plan: Plan, seed: int) -> Engine:
    return Engine(plan, seed=seed, options=OPTIONS, device=torch.device("cpu"), timeout_s=30)


def train(engine: Engine, steps: Sequence[int]) -> None:
    for step in steps:
        documents = make_documents(LENGTHS, seed=step)
        assert engine.step(step, mini_batch_of(documents), reader(documents)).updated


def progress_of(plan: Plan, engine: Engine, step: int) -> Progress:
    return Progress(
        hotspa_checkpoint=1, step=step, updates=engine.home.updates, data={"step": step}, corpus=DIGEST,
        plan=plan_digest(plan), model=plan.model, precision=plan.precision,
    )  # fmt: skip


def copied(engine: Engine) -> State:
    return {key: tensor.clone() for key, tensor in engine.home.state().items()}


def run_through(rank: int, world_size: int, folder: Path) -> tuple[State, State]:
    """The state after the checkpoint of step 2, and after the last step."""
    engine = engine_of(PLAN, seed=0)
    train(engine, [1])
    save_checkpoint(folder, engine.home, progress_of(PLAN, engine, 1))
    train(engine, [2])
    save_checkpoint(folder, engine.home, progress_of(PLAN, engine, 2))
    saved = copied(engine)
    train(engine, range(3, LAST + 1))
    return saved, copied(engine)


def resume(rank: int, world_size: int, folder: Path, plan: Plan) -> tuple[State, State]:
    """The state as it was loaded, and after the last step."""
    engine = engine_of(plan, seed=7)  # other initial weights: whatever is not loaded shows
    found = find_checkpoint(folder)
    progress = open_checkpoint(found, plan)
    load_checkpoint(found, engine.home, progress)
    assert engine.home.updates == 2
    loaded = copied(engine)
    train(engine, range(progress.step + 1, LAST + 1))
    return loaded, copied(engine)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[State, State]]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(4, run_through, folder)


def whole(plan: Plan, states: Sequence[State], kind: str) -> State:
    parts = [{k.partition(".")[2]: t for k, t in state.items() if k.startswith(f"{kind}.")} for state in states]
    return sum_of_partials(plan.home_layout, parts, make_weights())


def test_the_same_plan_goes_on_to_the_same_bits(run: tuple[Path, list[tuple[State, State]]]) -> None:
    """Master weights and both moments, as loaded and two steps later."""
    folder, expected = run
    for before, after in zip(expected, run_ranks(4, resume, folder, PLAN), strict=True):
        for old, new in zip(before, after, strict=True):
            assert old.keys() == new.keys() and len(old) > 3
            assert all(torch.equal(old[key], new[key]) for key in old)


@pytest.mark.parametrize("name", OTHERS)
def test_another_plan_or_another_number_of_ranks_goes_on_alike(
    run: tuple[Path, list[tuple[State, State]]], name: str
) -> None:
    """A plan is for one machine and one mix of lengths; a training run outlives both."""
    folder, expected = run
    plan = OTHERS[name]
    found = run_ranks(plan.cluster.num_ranks, resume, folder, plan)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for moment, tolerance in ((0, 0.0), (1, 1e-10)):  # as loaded, then after two more steps
            old = whole(PLAN, [states[moment] for states in expected], kind)
            new = whole(plan, [states[moment] for states in found], kind)
            for key, tensor in old.items():
                torch.testing.assert_close(new[key], tensor, rtol=0, atol=tolerance, msg=f"{kind} of {key}")
                assert tensor.abs().max() > 0


def save_and_die(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 is killed in the middle of writing its tensors."""
    engine = engine_of(PLAN, seed=0)
    train(engine, [1])
    write = FileSystemWriter.write_data

    def die(self: FileSystemWriter, *args: object) -> object:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)  # type: ignore[arg-type]

    FileSystemWriter.write_data = die  # type: ignore[method-assign, assignment]
    save_checkpoint(folder, engine.home, progress_of(PLAN, engine, 3))


def save_again(rank: int, world_size: int, folder: Path) -> str:
    engine = engine_of(PLAN, seed=0)
    train(engine, [1])
    return save_checkpoint(folder, engine.home, progress_of(PLAN, engine, 3)).name


def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint(
    run: tuple[Path, list[tuple[State, State]]], tmp_path: Path
) -> None:
    """Nobody watches a run at the hour when its machine dies."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(4, save_and_die, folder)
    assert (folder / ".step-000003.partial").is_dir()
    assert find_checkpoint(folder).name == "step-000002"
    open_checkpoint(find_checkpoint(folder), PLAN)
    for _ in range(2):  # what was left does not disturb, nor does a whole one of the same step
        assert run_ranks(4, save_again, folder) == ["step-000003"] * 4
        assert find_checkpoint(folder).name == "step-000003"
        assert not list(folder.glob(".*"))


def save_without_a_disk(rank: int, world_size: int, folder: Path) -> str:
    engine = engine_of(PLAN, seed=0)

    def fail(self: FileSystemWriter, *args: object) -> object:
        raise OSError(28, "No space left on device")

    if rank == 2:
        FileSystemWriter.write_data = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(folder, engine.home, progress_of(PLAN, engine, 3))
    return str(error.value)


def test_a_full_disk_on_one_rank_is_told_by_all(tmp_path: Path) -> None:
    """The others would wait, or go on without a checkpoint."""
    for said in run_ranks(4, save_without_a_disk, tmp_path):
        assert said.startswith(f"writing checkpoint {tmp_path}/step-000003: rank 2: ") and "No space left" in said


def test_a_checkpoint_that_lacks_something_is_refused_before_it_is_loaded(
    run: tuple[Path, list[tuple[State, State]]], tmp_path: Path
) -> None:
    """Silently fresh moments spoil a run that looks healthy."""
    folder = shutil.copytree(run[0], tmp_path / "run") / "step-000002"
    metadata = FileSystemReader(folder).read_metadata()
    stored = metadata.state_dict_metadata["exp_avg.lm_head.weight"]
    lost = replace(metadata, state_dict_metadata={
        **metadata.state_dict_metadata,
        "exp_avg.lm_head.weight": replace(stored, chunks=stored.chunks[1:]),  # type: ignore[arg-type, union-attr]
    })  # fmt: skip
    with pytest.raises(InputError, match=r"exp_avg\.lm_head\.weight has \d+ of 2144 elements"):
        require_whole(lost, MODEL, PLAN.precision, "here")
    del metadata.state_dict_metadata["exp_avg_sq.model.norm.weight"]
    with pytest.raises(InputError, match=r"exp_avg_sq\.model\.norm\.weight is missing"):
        require_whole(metadata, MODEL, PLAN.precision, "here")
    (file, *_) = sorted(folder.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InputError, match=rf"{file.name}: \d+ of \d+ bytes"):
        open_checkpoint(folder, PLAN)
    file.unlink()
    with pytest.raises(InputError, match=rf"{file.name}: 0 of"):
        open_checkpoint(folder, PLAN)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(InputError, match=r"\.metadata cannot be read"):
        open_checkpoint(folder, PLAN)


def test_a_checkpoint_of_another_model_or_none_is_refused(
    run: tuple[Path, list[tuple[State, State]]], tmp_path: Path
) -> None:
    """The key and both values are named; the model's name alone does not matter."""
    folder = find_checkpoint(run[0])
    named = MODEL.model_copy(update={"name": "renamed"})
    open_checkpoint(folder, make_plan(named, phases("dp1"), home="dp1"))
    deeper = MODEL.model_copy(update={"rope_theta": 5e5})
    with pytest.raises(InputError, match="its model has rope_theta 10000"):
        open_checkpoint(folder, make_plan(deeper, phases("dp1"), home="dp1"))
    with pytest.raises(InputError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)


def test_checkpoints_of_steps_that_are_done_again_are_set_aside(tmp_path: Path) -> None:
    """A run that goes on from an earlier step would otherwise be resumed from the branch that it left."""
    for step in (2, 4, 8):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "progress.yaml").touch()
    set_aside(tmp_path, behind=4)
    assert find_checkpoint(tmp_path).name == "step-000004"
    assert (tmp_path / ".step-000008.abandoned" / "progress.yaml").exists()
