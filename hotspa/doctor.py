"""`hotspa doctor`: can this machine plan and run? Each check does the thing in small."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from hotspa.reports import print_json

if TYPE_CHECKING:
    import torch

    from solver.backend import Backend


class Finding(NamedTuple):
    check: str
    good: bool
    detail: str


# Two ranks sum a tensor through a file rendezvous: no port is opened by us, and nothing is left behind.
_GLOO = """
import sys, datetime, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
limit = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=limit)
x = torch.ones(1); dist.all_reduce(x); assert x.item() == 2; dist.destroy_process_group()
"""


def examine(*, as_json: bool) -> int:
    """Run every check and print it; returns 0 if all that is needed to plan and run works, else 1."""
    findings = [_finding(name, check) for name, check in _CHECKS.items()]
    if as_json:
        print_json({"checks": [finding._asdict() for finding in findings]})
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.good else 'FAIL'}  {finding.check:<16} {finding.detail}")
    return 0 if all(finding.good for finding in findings) else 1


def _finding(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except Exception as error:  # whatever a check meets is its finding
        return Finding(
            name, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        )


def _python() -> str:
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        raise RuntimeError(f"Python {platform.python_version()}; hotspa is tested on 3.11 and 3.12")
    return platform.python_version()


def _torch() -> str:
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 11):
        raise RuntimeError(f"torch {torch.__version__}; 2.11 or newer is needed")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{torch.__version__}, {device}"


def _solver(backend: "Backend") -> Callable[[], str]:
    def check() -> str:
        from solver.backend import probe

        return probe(backend)

    return check


def _gloo() -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, "-c", _GLOO, str(rank), f"{folder}/meet"], stderr=subprocess.PIPE)
                 for rank in range(2)]  # fmt: skip
        try:
            for rank, process in enumerate(ranks):
                _, error = process.communicate(timeout=60)
                if process.returncode:
                    raise RuntimeError(f"rank {rank}: {error.decode().strip().splitlines()[-1]}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return "2 local ranks can sum"


def _transport() -> str:
    import torch
    import torch.distributed as dist

    if _device().type == "cpu":
        return "gloo"
    if not dist.is_nccl_available():
        raise RuntimeError("a GPU is here, but this torch has no NCCL")
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} for data, gloo for agreement"


def _attention() -> str:
    import torch

    from executor.attention import attention_in
    from executor.varlen import refusal

    device, bf16 = _device(), torch.bfloat16
    x_THE = torch.ones(8, 2, 128, dtype=bf16, device=device)
    attention_in((3, 5), 128, bf16, device)(x_THE, x_THE, x_THE).sum().item()
    reason = refusal(128, bf16, device)
    return f"document by document: {reason}" if reason else "varlen_attn in bf16 and fp16, else document by document"


def _compile() -> str:
    import torch

    from executor.kernels import compile_refusal, compiled

    device = _device()
    if lacking := compile_refusal(device):
        return f"not with --compile: {lacking}"
    compiled().swiglu(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device))
    return "torch.compile works, for --compile"


def _device() -> "torch.device":
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(".").free
    return f"{total / 2**30:.1f} GiB, {os.cpu_count()} cores, {free / 2**30:.0f} GiB free on disk"


_CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "torch": _torch,
    "cpsat": _solver("cpsat"),
    "highs": _solver("highs"),
    "cbc": _solver("cbc"),
    "gloo": _gloo,
    "transport": _transport,
    "attention": _attention,
    "compile": _compile,
    "machine": _memory,
}
