"""Proposers of known draft trees: whatever they draft, the text must be the target's own."""

import random

import torch
from dflash_hub.drafter_draft import Draft

TREES = ("random", "half-right", "oracle")


class ScriptedTrees:
    """Drafts trees of random shape around a known text.

    Args:
        text: (length) token ids, the prompt included, that the target writes.
        kind: "random" knows nothing of it; "oracle" has the true path in every tree, as the last sibling at each depth;
            "half-right" has it up to a depth that changes from round to round; "chain" is the text as a tree without branches;
            "empty" has no nodes.
        vocab: token ids are below this.
        target_layer_ids: whose hidden states it asks for, and checks for their number.
    """

    def __init__(self, text: list[int], kind: str, vocab: int, depth: int = 4, target_layer_ids: list[int] = (1,)):
        self.text, self.kind, self.vocab = text, kind, vocab
        self.max_draft_tokens, self.target_layer_ids = depth, list(target_layer_ids)
        self.device, self.num_passes = torch.device("cpu"), 0
        self.random = random.Random(0)
        self.read_ids: list[int] = []
        self.states: list[torch.Tensor] = []

    def check(self, target):
        """Every target will do."""

    def read(self, accepted):
        self.read_ids += accepted.ids[0].tolist()
        self.states.append(accepted.states[0][0])
        assert accepted.states[0].shape[1] == accepted.ids.shape[1]

    def absorb(self):
        """Nothing is compressed."""

    def skip(self, count: int):
        raise AssertionError("no prefix is left out here")

    def keep(self, cache, ids):
        """Nothing is kept."""

    def resume(self, cache, prefix, batch, length):
        return None

    def propose(self, anchor, plan, sampler) -> Draft:
        self.num_passes += 1
        start = sampler.text.lengths[0]
        assert self.read_ids == sampler.text.ids[0, : start - 1].tolist() and int(anchor) == int(
            sampler.text.ids[0, start - 1]
        )
        depth = plan.num_draft_tokens
        true = [self.text[i] if i < len(self.text) else 0 for i in range(start, start + depth)]
        if plan.num_nodes is None:  # no room for a tree
            return Draft(torch.tensor([true]) if self.kind == "oracle" else torch.zeros(1, 0, dtype=torch.long))
        if self.kind == "empty":
            return Draft(torch.zeros(1, 0, dtype=torch.long), [])
        if self.kind == "chain":
            return Draft(torch.tensor([true]), [*range(-1, depth - 1)])
        right = {"random": 0, "half-right": self.num_passes % (depth + 1), "oracle": depth}[self.kind]
        tokens, parents, levels, on_path = [], [], [0], -1
        children: dict[int, set[int]] = {}

        def add(parent: int, token: int) -> int | None:
            if token in children.setdefault(parent, set()):
                return None  # two children of one node with one token are impossible
            children[parent].add(token)
            tokens.append(token)
            parents.append(parent)
            levels.append(levels[parent + 1] + 1)
            return len(tokens) - 1

        for level in range(depth):
            room = plan.num_nodes - len(tokens) - (right - level if level < right else 0)
            for _ in range(min(self.random.randrange(3), room)):  # beside the path, at any depth that is not too deep
                parent = self.random.choice([i for i in range(-1, len(tokens)) if levels[i + 1] < depth])
                wrong = true[levels[parent + 1]]
                add(parent, self.random.choice([token for token in range(1, self.vocab) if token != wrong]))
            if level < right:
                on_path = add(on_path, true[level])
        if not tokens:
            add(-1, (true[0] + 1) % self.vocab)
        return Draft(torch.tensor([tokens]), parents)
