"""Context parallelism: a row is divided among the ranks of a group, which gather the keys and values that they lack.

Each rank computes everything for its own tokens (plans.context says which). In attention alone a token needs others:
keys and values of the documents that are on several ranks are gathered once per layer, and in the backward pass their
gradients, of which each rank has a partial sum, are added and scattered. Documents that are on one rank stay there.

T: tokens of the row on this rank, S: tokens that each rank gives, P: tokens of a piece, N: tokens of a document up to
its piece's last, H: query heads, K: key and value heads, E: size of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.rank_group import RankGroup, gather_shards
from executor.shares import Share
from executor.varlen import Attend

_BLOCK = 256
"""Queries of a piece that attend at a time: the mask is as wide as a document, but only so high."""


class ContextParallel(RankGroup):
    """A rank's place in its context-parallel group."""

    axis = "cp"


def shared_attention(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, share: Share, mask: Tensor, attend: Attend, cp: ContextParallel
) -> Tensor:
    """Each token attends to itself and to the earlier ones of its document, wherever they are, [T, H, E].

    Args:
        attend: for the whole documents of this rank, see executor.attention.
        mask: see `mask_of`; one for all layers.
    """
    own = sum(piece.tokens for piece in share.split_pieces)
    sizes = [own, len(q_THE) - own]
    (split_q, whole_q), (split_k, whole_k), (split_v, whole_v) = (x.split(sizes) for x in (q_THE, k_TKE, v_TKE))
    outputs = []
    if share.split_pieces:  # then every rank of the group has some
        keys, values = _gather_documents(split_k, split_v, share, cp)
        queries = split_q.split([piece.tokens for piece in share.split_pieces])
        for piece, q_PHE in zip(share.split_pieces, queries, strict=True):
            k_NKE, v_NKE = (x[piece.document][: piece.last] for x in (keys, values))
            outputs.append(_late_attention(q_PHE, k_NKE, v_NKE, mask))
    outputs.append(attend(whole_q, whole_k, whole_v))
    return torch.cat(outputs)


def mask_of(share: Share, dtype: torch.dtype) -> Tensor:
    """What hides the tokens behind a query: one mask whose views serve every block of every piece.

    Row r sees the columns up to width + r. Queries [first, first + rows) of a document need one that sees the keys up
    to first + r: that is the view of rows columns more than first, beginning at width - first.
    """
    height = min(_BLOCK, max((piece.tokens for piece in share.split_pieces), default=0))
    width = max((piece.last for piece in share.split_pieces), default=0)
    return torch.full((height, width + height), -torch.inf, dtype=dtype, device=share.index.device).triu_(width + 1)


def _gather_documents(
    k_TKE: Tensor, v_TKE: Tensor, share: Share, cp: ContextParallel
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of every split document, from this rank's of its pieces; one exchange for both."""
    both = torch.cat([k_TKE, v_TKE], dim=1)
    both = F.pad(both, (0, 0, 0, 0, 0, share.sent_tokens - len(both)))
    k_NKE, v_NKE = gather_shards(both, cp)[share.order].chunk(2, dim=1)
    return k_NKE.split(share.split_lengths), v_NKE.split(share.split_lengths)


def _late_attention(q_PHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, mask: Tensor) -> Tensor:
    """Attention of the last P tokens of a document of N, [P, H, E]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_PHE, k_NKE, v_NKE))
    first = k.shape[2] - q.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if not first:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    outputs = []
    width = mask.shape[1] - mask.shape[0]
    for block in q.split(_BLOCK, dim=2):
        rows = block.shape[2]
        seen = mask[:rows, width - first : width + rows]
        if seen.is_cuda:
            seen = seen.contiguous()  # kernels read it in pieces of 16 bytes, which a view need not begin with
        out = F.scaled_dot_product_attention(
            block, k[:, :, : first + rows], v[:, :, : first + rows], attn_mask=seen, enable_gqa=gqa
        )
        outputs.append(out)
        first += rows
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
