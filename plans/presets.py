"""Models and clusters by name or by file."""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from plans.cluster import MAX_RANKS, ClusterSpec
from plans.errors import InputError
from plans.huggingface import CONFIG_NAME, read_config
from plans.model import ModelSpec
from plans.strict_yaml import read_record

FOLDER = Path(__file__).parent / "presets"
_GRID = re.compile(r"(?:([1-9][0-9]{0,8})x)?([1-9][0-9]{0,8})")
_MODEL_FORMS = "a preset's name, a model.yaml, a config.json or its folder"
_CLUSTER_FORMS = "PRESET:NODESxGPUS (like a800-80g:2x8), local:N (like local:4) or a cluster.yaml"


def load_model(name_or_path: str) -> ModelSpec:
    """A preset by name, a model.yaml, a Hugging Face config.json or the folder that holds one.

    A preset wins over a local folder of its name; write ./NAME for the folder.

    Raises:
        InputError: unknown name, unreadable file, or a model that is not supported.
    """
    path, names = Path(name_or_path), preset_names("models")
    if name_or_path in names:
        return read_record(FOLDER / "models" / f"{name_or_path}.yaml", ModelSpec)
    if os.path.isdir(path):  # False, too, for a name that no file can have
        return read_config(path / CONFIG_NAME)
    if path.suffix == ".json":
        return read_config(path)
    if path.suffix in (".yaml", ".yml"):
        return read_record(path, ModelSpec)
    raise InputError(f"{name_or_path}: unknown model ({nearest(name_or_path, names)}); write {_MODEL_FORMS}")


def load_cluster(text_or_path: str) -> ClusterSpec:
    """`a800-80g:2x8` (nodes x ranks per node), `local:4`, or a cluster.yaml.

    Raises:
        InputError: unknown name, a form that cannot be read, unreadable file.
    """
    if Path(text_or_path).suffix in (".yaml", ".yml"):
        return read_record(text_or_path, ClusterSpec)
    name, _, grid = text_or_path.partition(":")
    names = preset_names("clusters")
    if name not in names:
        raise InputError(f"{text_or_path}: unknown cluster ({nearest(name, names)}); write {_CLUSTER_FORMS}")
    match = _GRID.fullmatch(grid)
    if match is None or (match[1] is None) != (name == "local"):
        raise InputError(f"{text_or_path}: not a cluster; write {_CLUSTER_FORMS}")
    nodes, ranks_per_node = int(match[1] or 1), int(match[2])
    if nodes * ranks_per_node > MAX_RANKS:
        raise InputError(f"{text_or_path}: {nodes * ranks_per_node} ranks; at most {MAX_RANKS}")
    changes: dict[str, object] = {"name": text_or_path, "nodes": nodes, "ranks_per_node": ranks_per_node}
    if name == "local":
        changes["memory_bytes"] = machine_memory_bytes() // ranks_per_node
    template = read_record(FOLDER / "clusters" / f"{name}.yaml", ClusterSpec)
    return ClusterSpec.model_validate({**dict(template), **changes})


def preset_names(folder: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / folder).glob("*.yaml"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Which known name was meant, or all of them."""
    names = list(known)
    near = get_close_matches(name, names, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the container where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def machine_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
