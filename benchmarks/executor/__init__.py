"""The executor's speed beside that of plain PyTorch, transformers and other ways to train on several ranks.

    work    real packed text, the same documents for both sides
    race    ours and another one, step for step on the same mini_batch, in the same processes, in turns
    table   median and spread of the ratios of neighbouring steps

A step is all of it: forward, backward, reduction of gradients, clip by norm, AdamW. Before a race counts, the loss and
the gradient's norm of the first step must agree: the sides have the same weights and documents.
"""
