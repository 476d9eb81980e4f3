"""Two nodes on one machine: network namespaces joined by a link of a chosen speed, and ranks that run in them.

Everything between the nodes passes the link, and what shares memory inside one cannot see into the other
(executor.node). It takes Linux, root and iproute2.
"""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.allocator import keep_freed_memory
from executor.world import join_world

GIGABIT = 10**9
_INTERFACE = "GLOO_SOCKET_IFNAME"  # a variable that gloo reads
_SUBNET = "10.213.77"


class NoNodesError(Exception):
    """They cannot be made here; says why."""


@dataclass(frozen=True, kw_only=True)
class EmulatedNode:
    """One of the two."""

    namespace: str
    interface: str  # its end of the link

    def command(self, *words: str) -> list[str]:
        """What runs a command on the node."""
        return ["ip", "netns", "exec", self.namespace, *words]


@contextmanager
def emulated_nodes(bits_per_s: int = GIGABIT) -> Iterator[tuple[EmulatedNode, EmulatedNode]]:
    """Two nodes and the link between them, so fast in each direction. They are gone afterwards, whatever happens.

    Raises:
        NoNodesError: this process may not make them, or lacks a tool for it.
    """
    _require_tools()
    mine = f"hotspa{os.getpid()}"
    nodes = tuple(EmulatedNode(namespace=f"{mine}{end}", interface=f"hsp{os.getpid()}{end}") for end in "ab")
    with ExitStack() as stack:
        for node in nodes:
            _must("ip", "netns", "add", node.namespace)
            stack.callback(_try, "ip", "netns", "delete", node.namespace)
        first, second = nodes
        _must(
            *("ip", "link", "add", first.interface, "netns", first.namespace, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.namespace),
        )
        stack.callback(_try, "ip", "-n", first.namespace, "link", "delete", first.interface)  # and its peer
        for number, node in enumerate(nodes, start=1):
            inside = "ip", "-n", node.namespace
            _must(*inside, "address", "add", f"{_SUBNET}.{number}/24", "dev", node.interface)
            _must(*inside, "link", "set", "lo", "up")
            _must(*inside, "link", "set", node.interface, "up")
            _must(
                *("tc", "-n", node.namespace, "qdisc", "add", "dev", node.interface, "root"),
                *("tbf", "rate", f"{bits_per_s}bit", "burst", "256kb", "latency", "50ms"),
            )
        yield first, second


def on_nodes(
    nodes: Sequence[EmulatedNode],
    ranks_per_node: int,
    fn: Callable[..., object],
    *args: object,
    timeout_s: float = 300.0,
) -> list[Any]:
    """Call fn(*args) on every rank of a gloo world, one thread each; results in rank order.

    `fn` and what it takes and gives can be pickled, by a name that is not in `__main__`. No rank outlives the call.

    Raises:
        RuntimeError: a rank failed, or all were too slow; with the last lines of what it wrote.
    """
    world_size = len(nodes) * ranks_per_node
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((world_size, timeout_s, fn, args)))
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world_size):
            node = nodes[rank // ranks_per_node]
            log = stack.enter_context(_log(folder, rank).open("wb"))
            process = subprocess.Popen(
                node.command(sys.executable, "-m", "benchmarks.emulated_nodes", name, str(rank)),
                env=os.environ | {_INTERFACE: node.interface, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
            ranks.append(process)
        _wait(ranks, folder, time.monotonic() + timeout_s)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world_size)]


def link_bytes() -> int:
    """On a rank: what its node has sent over the link so far, by the interface's counter."""
    interface = Path("/sys/class/net") / os.environ[_INTERFACE]
    return int((interface / "statistics" / "tx_bytes").read_text())


def _require_tools() -> None:
    if sys.platform != "linux":
        raise NoNodesError("network namespaces are a part of Linux")
    if os.geteuid() != 0:
        raise NoNodesError("making network namespaces takes root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NoNodesError(f"no {' and no '.join(missing)} here: install iproute2")


def _must(*words: str) -> None:
    found = subprocess.run(words, capture_output=True, text=True)
    if found.returncode:
        raise NoNodesError(f"`{' '.join(words)}` was refused: {found.stderr.strip() or found.stdout.strip()}")


def _try(*words: str) -> None:
    subprocess.run(words, capture_output=True)


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], folder: Path, deadline_s: float) -> None:
    """Until all have ended well; the first that fails ends the wait."""
    codes = [process.poll() for process in ranks]
    while None in codes and not any(codes) and time.monotonic() < deadline_s:
        time.sleep(0.05)
        codes = [process.poll() for process in ranks]
    if any(code != 0 for code in codes):
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        rank = codes.index(None) if failed is None else failed
        lines = "\n".join(_log(folder, rank).read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"rank {rank} {'was too slow' if failed is None else 'failed'}\n{lines}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _log(folder: Path, rank: int) -> Path:
    return folder / f"log-{rank}"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _rank_main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as the executor's ranks do
    world_size, timeout_s, fn, args = pickle.loads((folder / "call").read_bytes())
    limit = timedelta(seconds=timeout_s)
    join_world(torch.device("cpu"), rank, world_size, limit, init_method=f"file://{folder}/store")
    _result(folder, rank).write_bytes(pickle.dumps(fn(*args)))
    dist.barrier()  # nobody closes its connections while another may still read from them
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]), int(sys.argv[2]))
