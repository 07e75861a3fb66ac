"""Trees of draft tokens: built, described and verified.

Node 0 of a tree is the last committed token; a parent stands before its children. A tree's links are each
node's first child and its next sibling, -1 for none.
"""

from __future__ import annotations

import torch
from torch import Tensor

QLEN_ONLY = 1
"""The mask mode in which a row has columns for the draft tokens only, and none for committed ones."""


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of each tree, from which nodes are above which."""
    n = draft_token_num
    above = tree_mask.view(batch_size, n, n).bool().tril(-1)
    parents = torch.where(above, torch.arange(n), -1).amax(-1)
    # later[:, k, i]: k is a later sibling of i
    later = (parents[:, :, None] == parents[:, None, :]) & (parents[:, None, :] >= 0)
    later &= torch.ones(n, n, dtype=torch.bool).tril(-1)
    positions.view(batch_size, n).copy_(above.sum(-1) + verified_seq_len.view(batch_size, 1))
    retrieve_index.copy_(torch.arange(batch_size * n).view(batch_size, n))
    retrieve_next_token.copy_(_first(above))
    retrieve_next_sibling.copy_(_first(later))


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Mask, positions and links of the trees that a draft model's ``topk`` choices make.

    Args:
        parent_list: of each group of ``topk`` candidates, the candidate that they follow.
        selected_index: the candidates that became nodes, in ascending order.
    """
    n, batch_size = draft_token_num, len(verified_seq_len)
    group = selected_index.view(batch_size, n - 1) // topk
    followed = parent_list.view(batch_size, -1).gather(1, group)
    found = followed[:, :, None] == selected_index.view(batch_size, 1, n - 1)
    parents = torch.where(group == 0, 0, found.int().argmax(-1) + 1)
    mask = torch.eye(n, dtype=torch.bool).repeat(batch_size, 1, 1)
    for node in range(1, n):
        mask[:, node] |= mask[torch.arange(batch_size), parents[:, node - 1]]
    reconstruct_indices_from_tree_mask(
        mask, verified_seq_len, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling,
        batch_size, n,
    )  # fmt: skip
    begin = 0
    for tree, committed in zip(mask, verified_seq_len.tolist(), strict=True):
        width = n if tree_mask_mode == QLEN_ONLY else committed + n
        tree_mask[begin : begin + n * width].view(n, width)[:, width - n :] = tree
        begin += n * width


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow each tree from its root, by the child that the target predicts, for as long as there is one.

    Args:
        predicts: gets the target's token at each node that was reached.
        accept_index: gets the nodes that were reached, as ``retrive_index`` numbers them.
        accept_token_num: gets how many there are below the root.
    """
    predicted = target_predict.flatten().tolist()
    tokens, number = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for i, indices in enumerate(number):
        reached = [0]
        while len(reached) < accept_index.shape[1]:
            node = child[i][reached[-1]]
            while node != -1 and tokens[i][node] != predicted[indices[reached[-1]]]:
                node = sibling[i][node]
            if node == -1:
                break
            reached.append(node)
        at = torch.tensor([indices[node] for node in reached])
        predicts[at] = target_predict.flatten()[at].to(predicts.dtype)
        accept_index[i, : len(at)] = at.to(accept_index.dtype)
        accept_token_num[i] = len(reached) - 1


def _first(holds: Tensor) -> Tensor:
    """Of ``[trees, k, i]``: for each ``i`` the first ``k`` for which it holds, else -1."""
    return torch.where(holds.any(1), holds.int().argmax(1), -1)
