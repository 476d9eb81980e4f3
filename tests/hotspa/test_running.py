"""`hotspa run` offers what the executor offers, and passes on what it is given."""

import pytest
from typer.main import get_command

from executor.__main__ import _parser
from hotspa import launch
from hotspa.cli import app
from tests.hotspa.test_cli import Hotspa
from tests.hotspa.test_cli import hotspa as hotspa


def test_every_option_of_the_executor_is_one_of_hotspa_run() -> None:
    """Else the shorter command can do less, and nobody sees why."""
    theirs = {option for action in _parser()._actions for option in action.option_strings}
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    ours = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert ours == theirs - {"-h", "--help"}


def test_what_is_given_is_passed_on_and_nothing_else(hotspa: Hotspa, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's own defaults hold for the rest."""
    seen: list[object] = []

    def remember(*words: object) -> int:
        seen.extend(words)
        return 0

    monkeypatch.setattr(launch, "launch", remember)
    words = "run plan.yaml --data a --data b --steps 9 --out o"
    options = "--lr 1e-3 --lr-schedule cosine --resume o --compile --eval-data c"
    assert hotspa(*words.split(), *options.split()).code == 0
    assert list(map(str, seen[2:4])) == ["9", "o"]
    assert seen[4] == ["--resume", "o", "--lr", "0.001", "--lr-schedule", "cosine", "--compile", "--eval-data", "c"]
