"""The time that a pipeline takes, event by event, for micro_batches, stages and sends that are all unequal.

The order on a stage is that of plans.schedule.one_f_one_b, and an action waits for what it needs from its neighbour:

    F(s, m) after the stage's previous action and after F(s - 1, m) + send
    B(s, m) after the stage's previous action and after B(s + 1, m) + send

Sends take time but keep no stage busy. With P stages, *round* k of stage s is F(s, k + P - 1 - s) and then B(s, k). So
an F needs an F of the round before, and a B needs a B of its own round: going through the rounds in order, and within
each from the last stage to the first, meets every action after all that it waits for.

    num_stages=2, num_micro_batches=3       round  -1   0        1        2
                                            1F/1B       1F0 1B0  1F1 1B1  1F2 1B2
                                            0F/0B  0F0  0F1 0B0  0F2 0B1      0B2
"""

import math
from collections.abc import Sequence

Seconds = Sequence[Sequence[float]]


def makespan_s(forward_s: Seconds, backward_s: Seconds, send_s: Seconds) -> float:
    """Seconds from the first forward pass to the last backward pass.

    Args:
        forward_s: `[stage][micro_batch]`
        backward_s: `[stage][micro_batch]`
        send_s: `[stage][micro_batch]` between a stage and the next one, the same in both directions; one entry fewer.
    """
    num_stages, num_micro_batches = len(forward_s), len(forward_s[0])
    last = num_stages - 1
    if last == 0:
        return math.fsum(forward_s[0]) + math.fsum(backward_s[0])
    free = [0.0] * num_stages  # when the stage's last action so far ends
    sent = [0.0] * num_stages  # when the stage's last forward pass so far ends
    for k in range(-last, num_micro_batches):
        returned = 0.0  # when B(s + 1, k) ends
        for stage in range(last, -1, -1):
            at = free[stage]
            m = k + last - stage
            if 0 <= m < num_micro_batches:
                if stage:
                    arrival = sent[stage - 1] + send_s[stage - 1][m]
                    if arrival > at:
                        at = arrival
                at += forward_s[stage][m]
                sent[stage] = at
            if k >= 0:
                if stage < last:
                    arrival = returned + send_s[stage][k]
                    if arrival > at:
                        at = arrival
                at += backward_s[stage][k]
                returned = at
            free[stage] = at
    return max(free)
