"""How the target reads a draft tree in one forward pass: positions by depth, and a mask that shows a token its own path only.

The tokens of the pass are the anchor and the nodes, parents before their children. A node at depth d stands at the anchor's
position plus d, whatever its index in the pass, and attends to the KV cache, to its ancestors and to itself.

Legend of shapes: F tokens of the pass (the anchor and N nodes), P tokens in the KV cache, S keys of a layer.
"""

import inspect
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .target_masks import backend_mask, reaches

BACKENDS = ("eager", "sdpa", "flex_attention")  # those that take a ready mask
ALONE = -2  # in the place of a parent: a token that fills a pass of fixed length, and sees only itself
MASK_FORMS = ("by layer type", "one")  # a dictionary, for models that look masks up, or one mask for all layers
TREE_SIZES = (7, 15, 31, 63, 127)
# Other kinds of layers keep more than keys and values by token, or cannot move them.
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


@dataclass
class TreeShape:
    """Who is whose parent in a forward pass over a tree.

    Args:
        parents: by node, the index of its parent, -1 for the anchor and `ALONE` for none.
    """

    parents: list[int]

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each token of the pass, the anchor's 0 first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1 if parent >= -1 else 0)
        return depths

    @cached_property
    def children(self) -> list[list[int]]:
        """By token of the pass, the tokens that follow it, the likeliest first."""
        children = [[] for _ in range(len(self.parents) + 1)]
        for row, parent in enumerate(self.parents, start=1):
            if parent >= -1:
                children[parent + 1].append(row)
        return children

    @cached_property
    def paths(self) -> torch.Tensor:
        """(F, F) bool, True where a token attends to another of the pass: its ancestors and itself."""
        count = len(self.parents) + 1
        seen = torch.eye(count, dtype=torch.bool)
        for row, parent in enumerate(self.parents, start=1):
            if parent >= -1:
                seen[row] |= seen[parent + 1]
        return seen

    def padded(self, num_nodes: int) -> "TreeShape":
        """Fill up to `num_nodes` nodes with some that see only themselves, for passes of few different lengths."""
        return TreeShape(self.parents + [ALONE] * (num_nodes - len(self.parents)))


def pass_sizes(wanted: int | None) -> list[int]:
    """Return the nodes that a pass over a static KV cache can have, rising: few, as a target may be compiled for each, and those asked for."""
    return sorted({*TREE_SIZES, *([wanted] if wanted else [])})


def why_no_tree(target: PreTrainedModel, cache: Cache, batch: int, with_attentions: bool) -> str | None:
    """Say why target and KV cache cannot verify a tree, as far as their kinds tell; None where they can."""
    backend = target.config._attn_implementation
    if batch > 1:
        return f"a batch of {batch} sequences is drafted for in chains"
    if with_attentions:
        return "`output_attentions` asks for the attentions of single tokens"
    if backend not in BACKENDS:
        return (
            f"attention {backend!r} takes no ready mask; load the target with one of {', '.join(map(repr, BACKENDS))}"
        )
    if "position_ids" not in inspect.signature(target.forward).parameters:
        return f"{type(target).__name__} takes no `position_ids`"
    if cache.offloading:
        return "an offloaded KV cache does not stay where it is moved"
    for layer in cache.layers:
        if type(layer) not in _LAYERS and type(layer).__name__ != "DummyLayer":
            return f"a {type(layer).__name__} of the KV cache cannot keep a path of the tree"
    types = {kind for kind in layer_types(target, cache) if kind not in ("full_attention", "sliding_attention")}
    if types:
        return f"layers of type {', '.join(sorted(types))} have a mask of their own"
    return None


def layer_types(target: PreTrainedModel, cache: Cache) -> list[str]:
    """List the type of each layer of the KV cache, as the config says, or as the cache's layers tell."""
    types = getattr(target.config.get_text_config(decoder=True), "layer_types", None)
    if types:
        return list(types)[: len(cache.layers)]
    return ["sliding_attention" if getattr(layer, "is_sliding", False) else "full_attention" for layer in cache.layers]


def tree_inputs(
    target: PreTrainedModel,
    cache: Cache,
    shape: TreeShape,
    held: int,
    model_inputs: dict,
    padding: torch.Tensor | None,
    form: str,
) -> dict:
    """Return positions and masks for a forward pass over a tree.

    Args:
        held: P, tokens in the KV cache.
        model_inputs: of the pass, as the target prepared them for a chain.
        padding: (1, at least P) with 0 at padding, or None.
        form: one of `MASK_FORMS`.
    """
    depths = torch.tensor(shape.depths)
    positions = model_inputs.get("position_ids")
    if positions is None:
        raise ValueError(f"{type(target).__name__} was given no `position_ids`, which a draft tree needs.")
    device = positions.device
    masks = {}
    for index, kind in enumerate(layer_types(target, cache)):
        if kind not in masks:
            seen = _visible(cache, index, kind, shape, depths, held, padding, device)
            masks[kind] = backend_mask(
                seen[None, None], target.config._attn_implementation, target.dtype
            )  # (1, 1, F, S)
    mask = masks if form == "by layer type" else next(iter(masks.values()))
    return {"position_ids": positions[..., :1] + depths.to(device), "attention_mask": mask}


def _visible(cache, index: int, kind: str, shape: TreeShape, depths, held: int, padding, device) -> torch.Tensor:
    """(F, S) bool, True where a token of the pass attends to a key of one layer."""
    layer, count = cache.layers[index], len(depths)
    keys, first = cache.get_mask_sizes(count, index)  # the first key's column; a window has dropped those before it
    window = None
    if kind == "sliding_attention":
        window = layer.max_cache_len if isinstance(layer, StaticLayer) else getattr(layer, "sliding_window", None)
    seen = torch.zeros(count, keys, dtype=torch.bool)
    past = held - first
    seen[:, :past] = True if padding is None else padding[0, first:held].cpu() != 0
    seen[:, past : past + count] = shape.paths
    if window is not None:
        # Columns of the cache are as far apart as positions; the pass's own stand at their depth.
        place = torch.cat(
            [torch.arange(first, held), held + depths, torch.zeros(keys - past - count, dtype=torch.long)]
        )
        seen &= reaches(held + depths[:, None], place[None], window, causal=False)
    return seen.to(device)
