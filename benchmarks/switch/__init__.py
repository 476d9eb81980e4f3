"""The hot switch beside other ways to change the layout of weights.

    case            one switch on one rank: what it holds before, and what it needs
    ours            Switcher, over sockets (gloo) and out of the peers' storage (same node)
    checkpoint      torch.distributed.checkpoint: save, and load into other shards
    gathered        all-gather of every parameter, then slicing
    redistributed   DTensor.redistribute, where both layouts are placements on one mesh
    blocking        a blocking send and receive for each region
    batched         one batch of asynchronous sends and receives, one for each region
    fused           one buffer for each peer
    limit           the same bytes as contiguous messages and copies
    race            all of them in turns
    table           medians against each other, and the goals

Weights alone move, in fp32. What every side gives must have the bytes of the model.
"""
