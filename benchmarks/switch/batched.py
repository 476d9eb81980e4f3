"""One batch of asynchronous sends and receives, one for each region; local copies meanwhile."""

import torch
import torch.distributed as dist

from benchmarks.switch.case import Case, Weights


class Batched:
    def __init__(self, case: Case) -> None:
        self._case = case

    def run(self) -> Weights:
        case = self._case
        places = [case.brought(move) for move in case.receives]
        regions = [
            place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            for place in places
        ]
        operations = [dist.P2POp(dist.isend, case.taken(move).contiguous(), move.target) for move in case.sends]
        operations += [
            dist.P2POp(dist.irecv, region, move.source) for region, move in zip(regions, case.receives, strict=True)
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        case.copy_local()
        for work in works:
            work.wait()
        for place, region in zip(places, regions, strict=True):
            if place is not region:
                place.copy_(region)
        return case.new
