"""`hotspa run` offers what the executor offers, passes on what it is given, and plans for a Hugging Face folder."""

import json
from dataclasses import fields
from itertools import combinations
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.main import get_command

from executor.__main__ import _parser
from hotspa import launch
from hotspa.cli import app
from hotspa.planning import PlanRequest
from tests.hotspa.test_cli import Hotspa, command, refused
from tests.hotspa.test_cli import hotspa as hotspa

TEXT = Path(json.__file__).read_text(encoding="utf-8")


def test_every_option_of_the_executor_is_one_of_hotspa_run() -> None:
    """Else the shorter command can do less, and nobody sees why."""
    theirs = {option for action in _parser()._actions for option in action.option_strings}
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    ours = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    planning = {f"--{field.name.replace('_', '-')}" for field in fields(PlanRequest)}
    assert ours - planning == theirs - {"-h", "--help"}
    assert ours >= planning


def test_what_is_given_is_passed_on_and_nothing_else(
    hotspa: Hotspa, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The executor's own defaults hold for the rest."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    seen: list[object] = []

    def remember(*words: object) -> int:
        seen.extend(words)
        return 0

    monkeypatch.setattr(launch, "launch", remember)
    words = "run plan.yaml --data a --data b --steps 9 --out o --lr 1e-3 --lr-schedule cosine --resume o --eval-data c"
    assert hotspa(*words.split()).code == 0
    assert list(map(str, seen[2:4])) == ["9", "o"]
    assert seen[4] == ["--resume", "o", "--lr", "0.001", "--lr-schedule", "cosine", "--eval-data", "c"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config, weights and tokenizer of a model that nobody here has seen: made by the libraries that people use."""
    folder: Path = tmp_path_factory.mktemp("made") / "tiny-qwen"
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel()
    tokenizer.train_from_iterator([TEXT], BpeTrainer(vocab_size=300, show_progress=False))
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_and_a_corpus_are_enough(model_folder: Path, tmp_path: Path) -> None:
    """The machine is measured, a plan solved, and training goes on from the folder's own weights and tokenizer."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [TEXT[: 40 * n] for n in range(1, 9)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["run", model_folder, "--data", corpus, "--nproc", 2, "--sequences", 4, "--out", tmp_path / "run"]
    said = command(*words)
    assert said.returncode == 0, said.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]  # one pass over 8 sequences
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    documents = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
    assert steps[0]["sequences"] == 4 and sum(step["tokens"] for step in steps) == sum(d.numel() for d in documents)
    with torch.no_grad():
        sums = [float(model(d, labels=d).loss) * (d.numel() - 1) for d in documents]
    # The first step's documents are four of the eight, in a random order: some choice of four has its loss.
    means = [
        sum(sums[i] for i in chosen) / sum(documents[i].numel() - 1 for i in chosen)
        for chosen in combinations(range(8), 4)
        if sum(documents[i].numel() for i in chosen) == steps[0]["tokens"]
    ]
    assert min(abs(mean - steps[0]["loss"]) for mean in means) < 1e-5
    again = command(*words)
    assert again.returncode == 2 and "there is a plan already" in again.stderr


def test_planning_options_are_refused_beside_a_plan_file(hotspa: Hotspa, tmp_path: Path) -> None:
    """They would be ignored, and the user not told."""
    (tmp_path / "corpus.txt").write_text(TEXT)
    refused(hotspa("run", tmp_path / "plan.yaml", "--data", tmp_path / "corpus.txt", "--max-len", "9"), "--max-len")


def test_a_folder_without_a_tokenizer_is_refused(hotspa: Hotspa, tmp_path: Path) -> None:
    """Bytes would be a language that the model does not know, and no error."""
    (tmp_path / "corpus.txt").write_text(TEXT)
    (tmp_path / "model").mkdir()
    refused(hotspa("run", tmp_path / "model", "--data", tmp_path / "corpus.txt"), "tokenizer.json", "--tokenizer")
