"""Draft trees: the nodes that are likeliest to lie on the accepted path.

A node's score is the sum of log probabilities along its path. Taking the best node next, whichever it is, gives the tree of n
nodes with the longest expected path, as far as positions are independent (DDTree; `docs/internals/trees.md`).

Legend of shapes: n draft positions, C candidates of a position, P candidates of the position before it, N nodes.
"""

import heapq
from functools import cache

import torch

MAX_SIBLINGS = 32  # candidates of a position: a later one is not among the best nodes of any tree that pays


def best_first(log_probs: list, num_nodes: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Choose the nodes of a tree, the best one first; ties go to the smaller depth, then to the better rank.

    Args:
        log_probs: (n, C) nested lists, falling in each row; or (n, P, C), by the candidate at the position before.
        num_nodes: N, at most.

    Returns:
        (depths, ranks, parents, scores): by node its position from 0, its candidate there, the index of its parent (-1 for
        the anchor) and its log probability. Parents come first and scores fall, so the first nodes are the best smaller tree.
    """

    @cache
    def ranked(depth: int, before: int | None) -> list[tuple[float, int]]:
        row = log_probs[depth] if before is None else log_probs[depth][before]
        return sorted(((value, -rank) for rank, value in enumerate(row)), reverse=True)

    def candidates(depth: int, before: int) -> list[tuple[float, int]]:
        return ranked(depth, before if isinstance(log_probs[depth][0], list) else None)

    depths, ranks, parents, scores = [], [], [], []
    # An entry: (-score, depth, sibling number, parent's index, parent's score, the siblings).
    heap = []

    def push(depth: int, sibling: int, parent: int, before: float, siblings: list):
        if sibling < len(siblings) and siblings[sibling][0] > -torch.inf:
            heapq.heappush(heap, (-(before + siblings[sibling][0]), depth, sibling, parent, before, siblings))

    push(0, 0, -1, 0.0, candidates(0, 0))
    while heap and len(parents) < num_nodes:
        negated, depth, sibling, parent, before, siblings = heapq.heappop(heap)
        rank = -siblings[sibling][1]
        depths.append(depth)
        ranks.append(rank)
        parents.append(parent)
        scores.append(-negated)
        push(depth, sibling + 1, parent, before, siblings)
        if depth + 1 < len(log_probs):
            push(depth + 1, 0, len(parents) - 1, -negated, candidates(depth + 1, rank))
    return depths, ranks, parents, scores
