"""The planning problem of FlexSP (ASPLOS 2025): GPT-7B on A100-40G, sequence-parallel groups of unequal sizes.

Cost model, memory limit, data and mini-batches are those of its solver in PKU-DAIR/Hetu-Galvatron (Apache-2.0, branch
flexsp), and so is the list of lengths. Results of others were measured with that code on two cores. Above 64 ranks the
bandwidths are assumed, for FlexSP and for us alike.
"""

import gzip
import math
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plans.errors import InputError
from solver.replicas import Shared, Sharing

Ints = NDArray[np.int64]

PADDED_TO = 128  # tokens
LONGEST = 192 * 1000 - 128  # tokens, padded; longer ones are not in the data
PER_RANK = 8  # sequences of a mini_batch

COMPUTE_MS = (5.128e-6, 0.1839576)  # per squared token, per token; divided by the degree
ALL_TO_ALL_MIB = 16 * 32 * 4096 / 2**20  # per token; divided by the degree
MICRO_BATCH_MS = 629.3563
MIB_PER_MS = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87, 128: 4.4, 256: 4.2, 512: 4.1, 1024: 4.0}
"""Bandwidth of a group by its degree. One rank exchanges nothing; FlexSP does not use it."""

MEMORY_MIB = 30 * 1024
STATES_MIB = 7.1174468994140625 * 16 * 1024  # divided by all ranks
TOKEN_MIB = 4.480441895


def read_lengths(path: Path, count: int) -> Ints:
    """The first `count` sequences that are not too long, padded, in the order of the file.

    Raises:
        InputError: there is no such file.
    """
    if not path.is_file():
        raise InputError(
            f"no file {path}: this part needs FlexSP's list of 1,000,000 Wikipedia lengths (PKU-DAIR/Hetu-Galvatron, "
            "branch flexsp), one integer a line, gzipped; give its place with --wikipedia"
        )
    with gzip.open(path, "rt", encoding="ascii") as lines:
        padded = (-(-int(line) // PADDED_TO) * PADDED_TO for line in lines)
        return np.fromiter(islice((n for n in padded if n <= LONGEST), count), dtype=np.int64)


def mini_batch(lengths: Ints, num_ranks: int, index: int) -> Ints:
    size = PER_RANK * num_ranks
    return lengths[index * size : (index + 1) * size]


def rank_tokens(num_ranks: int) -> int:
    """Most tokens of a micro_batch on a group, per rank of it."""
    return math.floor((MEMORY_MIB - STATES_MIB / num_ranks) / TOKEN_MIB)


def sharing(tokens: Ints, num_ranks: int, least_degree: int = 2) -> Sharing:
    """The problem of one mini_batch, in seconds."""
    degrees = tuple(2**k for k in range(num_ranks.bit_length()) if least_degree <= 2**k <= num_ranks)
    capacity = tuple(degree * rank_tokens(num_ranks) for degree in degrees)
    n = tokens.astype(np.float64)
    seconds = np.array([(COMPUTE_MS[0] * n + COMPUTE_MS[1]) * n / d + all_to_all_ms(n, d) for d in degrees]) / 1e3
    return Sharing(
        num_ranks=num_ranks,
        tokens=tokens,
        ranks=degrees,
        seconds=np.where(tokens <= np.array(capacity)[:, None], seconds, np.inf),
        capacity_tokens=capacity,
        fixed_s=(MICRO_BATCH_MS / 1e3,) * len(degrees),
    )


def all_to_all_ms(tokens: NDArray[np.float64], degree: int) -> NDArray[np.float64]:
    if degree == 1:
        return np.zeros_like(tokens)
    found: NDArray[np.float64] = ALL_TO_ALL_MIB * tokens / degree / MIB_PER_MS[degree]
    return found


def verified_s(answer: Shared, tokens: Ints, num_ranks: int, least_degree: int = 2) -> float:
    """Seconds of an answer, worked out again from who runs where and from nothing else.

    Raises:
        ValueError: it drops or repeats a sequence, has a group of a wrong size, or a group that does not fit in memory.
    """
    ran: Counter[int] = Counter()
    total_ms = 0.0
    for number, groups in enumerate(answer.micro_batches):
        degrees = [least_degree << group.kind for group in groups]
        if sum(degrees) != num_ranks:
            raise ValueError(f"micro_batch {number} has {sum(degrees)} ranks, not {num_ranks}")
        slowest_ms = 0.0
        for group, degree in zip(groups, degrees, strict=True):
            lengths = [int(tokens[item]) for item in group.items]
            ran.update(group.items)
            if sum(lengths) > degree * rank_tokens(num_ranks):
                raise ValueError(f"micro_batch {number} has {sum(lengths)} tokens on {degree} ranks")
            work_ms = sum(COMPUTE_MS[0] * n * n + COMPUTE_MS[1] * n for n in lengths) / degree
            if degree > 1:
                work_ms += ALL_TO_ALL_MIB * sum(lengths) / degree / MIB_PER_MS[degree]
            slowest_ms = max(slowest_ms, work_ms + MICRO_BATCH_MS)
        total_ms += slowest_ms
    if ran != Counter(range(len(tokens))):
        raise ValueError("a sequence is missing or runs twice")
    return total_ms / 1e3
