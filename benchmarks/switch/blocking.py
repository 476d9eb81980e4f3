"""A blocking send and receive for each region, in one order on all ranks."""

import torch
import torch.distributed as dist

from benchmarks.switch.case import Case, Weights


class Blocking:
    def __init__(self, case: Case) -> None:
        self._case = case

    def run(self) -> Weights:
        case = self._case
        case.copy_local()
        for move in case.moves:
            if move.source == case.rank != move.target:
                dist.send(case.taken(move).contiguous(), move.target)
            elif move.target == case.rank != move.source:
                place = case.brought(move)
                if place.is_contiguous():
                    dist.recv(place, move.source)
                else:
                    region = torch.empty_like(place, memory_format=torch.contiguous_format)
                    dist.recv(region, move.source)
                    place.copy_(region)
        return case.new
