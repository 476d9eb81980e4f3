"""Strict files: what YAML guesses we refuse, and every refusal names the line, the key and what would be right."""

import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.cluster import ClusterSpec
from plans.errors import InputError
from plans.files import write_text
from plans.memory import MemoryRule
from plans.record import Record
from plans.strict_yaml import parse_record, read_record, record_text
from plans.yaml_text import parse_yaml

CLUSTER = """\
name: lab
nodes: 1
ranks_per_node: 4
memory_bytes: 8000000000
intra:
  latency_s: 1e-5
  bandwidth_bytes_per_s: 3.0e9
"""


def parse(text: str) -> ClusterSpec:
    return parse_record(text, ClusterSpec, "c.yaml")


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    """All refusals below would pass if nothing could be read."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER + "# a comment\n", encoding="utf-8")
    cluster = read_record(path, ClusterSpec)
    assert cluster.intra.latency_s == 1e-5
    assert cluster.num_ranks == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes: 1", "nods: 1", "c.yaml:2: nods: unknown key; did you mean nodes?"),
        ("latency_s", "latencys", "c.yaml:6: intra.latencys: unknown key; did you mean latency_s?"),
        ("nodes: 1", "nodes: 1\ncolour: 7", "c.yaml:3: colour: unknown key; known here: name, nodes,"),
        ("nodes: 1\n", "", "c.yaml:1: nodes: missing"),
        ("  latency_s: 1e-5\n", "", "c.yaml:5: intra.latency_s: missing"),
        ("nodes: 1", "nodes: 1\nnodes: 2", "c.yaml:3: nodes: the key stands here a second time, first in line 2"),
        ("nodes: 1", "nodes: '1'", 'c.yaml:2: nodes: "1" should be a valid integer'),
        ("nodes: 1", "nodes: 1.0", "c.yaml:2: nodes: 1.0 should be a valid integer"),
        ("nodes: 1", "nodes: true", "c.yaml:2: nodes: true should be a valid integer"),
        ("nodes: 1", "nodes: no", 'c.yaml:2: nodes: "no" should be a valid integer'),
        ("nodes: 1", "nodes: 1_000", 'c.yaml:2: nodes: "1_000" should be a valid integer'),
        ("nodes: 1", "nodes:", "c.yaml:2: nodes: nothing should be a valid integer"),
        ("nodes: 1", "nodes: [1]", "c.yaml:2: nodes: a list should be a valid integer"),
        ("nodes: 1", "nodes: 010", "c.yaml:2: nodes: a number does not begin with 0, got 010; write 10"),
        ("nodes: 1", "nodes: 0", "c.yaml:2: nodes: 0 should be greater than or equal to 1"),
        ("name: lab", "name: 7", "c.yaml:1: name: 7 should be a valid string"),
        ("3.0e9", "fast", 'c.yaml:7: intra.bandwidth_bytes_per_s: "fast" should be a valid number'),
        ("3.0e9", ".nan", "c.yaml:7: intra.bandwidth_bytes_per_s: .nan is not a finite number"),
        ("3.0e9", ".inf", "c.yaml:7: intra.bandwidth_bytes_per_s: .inf is not a finite number"),
        ("3.0e9", "1e999", "c.yaml:7: intra.bandwidth_bytes_per_s: 1e999 is not a finite number"),
        ("3.0e9", "nan", 'c.yaml:7: intra.bandwidth_bytes_per_s: "nan" should be a valid number'),
        ("intra:", "intra: 3\nrest:", "c.yaml:6: rest: unknown key"),
        ("nodes: 1", "nodes: 2", "c.yaml:1: 2 nodes need an `inter` link"),
        ("name: lab", "name: &a lab", "c.yaml:1: anchors and aliases are not read; write the value of 'a' out"),
        ("name: lab", "name: *a", "c.yaml:1: anchors and aliases are not read; write the value of 'a' out"),
        ("nodes: 1", "nodes: !!int 1", "c.yaml:2: nodes: the tag 'tag:yaml.org,2002:int' is not read; remove it"),
        ("nodes: 1", "? [1]\n: 1", "c.yaml:2: a key is a word or a number"),
        ("nodes: 1", "nodes: [1", "c.yaml:3: not YAML: expected ',' or ']', but got ':'"),
        ("nodes: 1", "nodes: \x07", "c.yaml:2: not YAML: the character U+0007 is not allowed"),
        ("intra:", "---\nintra:", "c.yaml:5: not YAML: but found another document"),
        (CLUSTER, "", "c.yaml:1: the file is empty"),
        (CLUSTER, "# nothing\n", "c.yaml:1: the file is empty"),
        (CLUSTER, "- 1\n", "c.yaml:1: keys of a ClusterSpec expected, found a list"),
        (CLUSTER, "just words", 'c.yaml:1: keys of a ClusterSpec expected, found "just words"'),
        (CLUSTER, "[" * 5000, "c.yaml:1: nested too deeply; at most 100 levels"),
        ("nodes: 1", "nodes:\n  " + "[" * 100 + "]" * 100, "c.yaml:3: nested too deeply; at most 100 levels"),
        ("name: lab", 'name: "\\uD800"', "c.yaml:1: name: U+D800 is half a character"),
        ("nodes: 1", '"n\\uDFFF": 1', "c.yaml:2: U+DFFF is half a character"),
        ("nodes: 1", 'nodes: "\\U00110000"', "c.yaml:2: not YAML: an escape that names no character"),
        ("nodes: 1", "nodes: 65537", "c.yaml:1: 65537 nodes"),
        ("latency_s: 1e-5", "latency_s: 3601", "c.yaml:6: intra.latency_s: 3601 should be less than or equal to 3600"),
        ("3.0e9", "0.5", "c.yaml:7: intra.bandwidth_bytes_per_s: 0.5 should be greater than or equal to 1"),
        ("3.0e9", "1e16", "c.yaml:7: intra.bandwidth_bytes_per_s: 1e+16 should be less than or equal to"),
    ],
)
def test_every_fault_is_one_line_with_its_place(old: str, new: str, message: str) -> None:
    """A key with a typo that is ignored trains a run with defaults; a fault without a line costs an hour."""
    assert old in CLUSTER
    with pytest.raises(InputError) as caught:
        parse(CLUSTER.replace(old, new, 1))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E5", 1e5), ("2e+11", 2e11), (".5", 0.5), ("5.", 5.0), ("3", 3.0), ("+3", 3.0), ("0", 0.0)],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float) -> None:
    """Plain PyYAML reads 1e-5 as a string."""
    assert parse_yaml(f"x: {text}\n", "c.yaml")[0] == {"x": value}


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "y", "NO", "1:30", "2024-01-01", "0x", "'7'", '"null"'])
def test_words_stay_words(word: str) -> None:
    """Plain PyYAML reads `no` as False and 1:30 as 90."""
    assert parse(CLUSTER.replace("name: lab", f"name: {word}")).name == word.strip("'\"")


def test_keys_of_a_mapping_are_checked_too() -> None:
    """activation_bytes has tensor-parallel degrees as keys."""
    text = "reserved_bytes: 1\nactivation_bytes:\n  none:\n    1: 2.0\n    two: 3.0\n"
    text += "working_bytes: {none: {1: 1.0, 2: 0.0}}\nlogit_bytes: 4.0\n"
    message = 'r.yaml:5: activation_bytes.none.two: "two" should be a valid integer'
    with pytest.raises(InputError, match=re.escape(message)):
        parse_record(text, MemoryRule, "r.yaml")
    assert parse_record(text.replace("two", "2"), MemoryRule, "r.yaml").activation_bytes == {"none": {1: 2.0, 2: 3.0}}


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """A traceback is no answer to a wrong path."""
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / name}: ")):
        read_record(tmp_path / name, ClusterSpec)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    """Someone passes the checkpoint instead of the plan."""
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(InputError, match=r"binary.yaml: not a text file \(byte 6 is not UTF-8\)"):
        read_record(path, ClusterSpec)


class Inner(Record):
    word: str
    number: float


class Everything(Record):
    """One field of every kind that a file of the project has."""

    text: str
    truth: bool
    whole: int
    number: float
    inner: Inner
    nothing: int | None
    absent: int | None = None
    listed: tuple[Inner, ...]
    nested: tuple[tuple[int, ...], ...]
    table: dict[int, float]


floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=130)
inners = st.builds(Inner, word=texts, number=floats)
everything = st.builds(
    Everything,
    text=texts
    | st.sampled_from(["no", "null", "~", "", "true", "1e-5", "010", "a: b", "a #b", "- a", "a:b", " a", "a "]),
    truth=st.booleans(),
    whole=st.integers(-(10**20), 10**20),
    number=floats,
    inner=inners,
    nothing=st.none() | st.integers(),
    absent=st.none() | st.integers(),
    listed=st.lists(inners, max_size=3).map(tuple),
    nested=st.lists(st.lists(st.integers(), max_size=40).map(tuple), max_size=3).map(tuple),
    table=st.dictionaries(st.integers(0, 64), floats, max_size=4),
)


@settings(max_examples=50)
@given(everything)
def test_what_is_written_reads_back_as_it_was(record: Everything) -> None:
    """Floats to the last bit: a plan that changes when it is read again has another digest on another rank."""
    text = record_text(record)
    again = parse_record(text, Everything, "e.yaml")
    assert again == record
    assert record_text(again) == text


@settings(max_examples=50)
@given(everything)
def test_what_is_written_is_yaml_for_others_too(record: Everything) -> None:
    """Editors and other tools read plans; only numbers like 1e-05 differ, which YAML 1.1 takes for words."""
    loaded = yaml.safe_load(record_text(record))
    assert loaded["text"] == record.text
    assert loaded["nested"] == [list(row) for row in record.nested]
    assert [item["word"] for item in loaded["listed"]] == [item.word for item in record.listed]


def test_the_canonical_text_is_short_and_in_the_order_of_the_fields() -> None:
    """People review it in a diff."""
    record = Everything(
        text="a word",
        truth=True,
        whole=7,
        number=1e-5,
        inner=Inner(word="1", number=2.0),
        nothing=None,
        listed=(Inner(word="sha256:ab", number=2e11), Inner(word="x" * 90, number=0.1)),
        nested=((1, 2), ()),
        table={16: 0.5, 2: 1.0},
    )
    assert record_text(record) == (
        "text: a word\ntruth: true\nwhole: 7\nnumber: 1e-05\n"
        'inner:\n  word: "1"\n  number: 2.0\n'
        "nothing: null\n"
        f"listed:\n- {{word: sha256:ab, number: 200000000000.0}}\n- word: {'x' * 90}\n  number: 0.1\n"
        "nested: [[1, 2], []]\n"
        "table:\n  2: 1.0\n  16: 0.5\n"
    )


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk must not cost the last good plan."""
    path = tmp_path / "plan.yaml"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"plan.yaml: cannot be written: No space left on device"):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_file_is_replaced_not_written_over(tmp_path: Path) -> None:
    """A rank that reads while another process writes sees one plan or the other, never half of each."""
    path = tmp_path / "plan.yaml"
    write_text(path, "old")
    (tmp_path / "reader.yaml").hardlink_to(path)
    write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert (tmp_path / "reader.yaml").read_text(encoding="utf-8") == "old"


def test_a_write_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """The message names the path that was asked for, not the temporary one."""
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'no' / 'plan.yaml'}: cannot be written")):
        write_text(tmp_path / "no" / "plan.yaml", "text")


@pytest.mark.parametrize("key", ["01", "+1", "1.0", "1_0", "' 1'", "-1", "0", "true"])
def test_a_degree_is_written_in_one_way(key: str) -> None:
    """`1` and `01` in one mapping would be one degree with two values."""
    text = f"reserved_bytes: 1\nactivation_bytes:\n  none:\n    1: 2.0\n    {key}: 3.0\n"
    text += "working_bytes: {none: {1: 1.0}}\nlogit_bytes: 4.0\n"
    with pytest.raises(InputError, match=re.escape("r.yaml:5: activation_bytes.")):
        parse_record(text, MemoryRule, "r.yaml")


def test_a_written_file_keeps_its_mode_and_the_link_to_it(tmp_path: Path) -> None:
    """A plan that colleagues may read stays one; a link to the newest plan stays a link."""
    path, link = tmp_path / "plan.yaml", tmp_path / "newest.yaml"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    link.symlink_to(path.name)
    write_text(link, "new")
    assert link.is_symlink()
    assert path.read_text(encoding="utf-8") == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_is_written_in_place(tmp_path: Path) -> None:
    """`-o /dev/stdout` prints; a pipe is not replaced by a file."""
    write_text("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["", ".", "a\0b", "x" * 5000])
def test_a_name_that_no_file_has_is_refused_for_writing(name: str) -> None:
    """`-o .` is a slip, not a traceback."""
    with pytest.raises(InputError, match="cannot be written"):
        write_text(name, "text")


def test_a_long_name_is_written(tmp_path: Path) -> None:
    """The temporary file beside it needs a shorter one."""
    write_text(tmp_path / ("x" * 255), "text")
    assert [p.name for p in tmp_path.iterdir()] == ["x" * 255]
