"""A caller's cache as it was before a forward pass, for a call that fails in the middle: interrupted, or by an error.

The caller may go on with the cache in any case, so it must never hold draft tokens, or the tokens of some layers only.
"""

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .target_cache import tensors_by_column

# The base of both kinds of quantized layers is newer than the oldest supported transformers.
_QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


class CacheSnapshot:
    """Put a cache back as it is now, whatever of it a forward pass or a rollback will have changed.

    Keys and values of the whole text are not copied: a pass adds columns behind them, and a rollback takes away no others.
    Copied is what a pass overwrites: recurrent states, static windows, lengths on the device.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        self.layers = [_LayerSnapshot(layer) for layer in cache.layers]

    def restore(self):
        """Put every layer back, and drop layers that were added since."""
        # Whoever interrupts this leaves a cache that says so, and not one of which some layers are back.
        self.cache.layers[:] = [LostLayer()] * max(len(self.cache.layers), 1)
        for layer in self.layers:
            layer.restore()
        self.cache.layers[:] = [snapshot.layer for snapshot in self.layers]


class LostLayer(DynamicLayer):
    """Stand in a cache for a layer of unknown content: whatever is asked of it raises a RuntimeError."""

    def __init__(self):
        """It holds nothing."""

    def __getattribute__(self, name: str):
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise RuntimeError(
            "this cache is not valid any more: a call of `generate` was interrupted, and so was putting the cache back as it "
            "was before. Start from a new cache and the whole text."
        )


class _LayerSnapshot:
    def __init__(self, layer):
        self.layer = layer
        self.columns: dict[str, tuple[int, int]] = {}  # by attribute: dimension and number of columns
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if type(layer).__module__ != cache_utils.__name__:  # it may keep anything, and change it in any way
            self.fields = _cloned(vars(layer))
            return
        self.fields = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
        if isinstance(layer, DynamicLayer) and not isinstance(layer, (DynamicSlidingWindowLayer, _QUANTIZED)):
            for _, name, dim, _ in tensors_by_column(layer, conv=False):
                self.columns[name] = dim, self.fields.pop(name).shape[dim]
        self.copies = [(tensor, tensor.clone()) for tensor in _overwritten(layer)]

    def restore(self):
        own = vars(self.layer)
        for name in own.keys() - self.fields.keys() - self.columns.keys():
            del own[name]
        for name, (dim, count) in self.columns.items():
            own[name] = own[name].narrow(dim, 0, count)
        own.update(self.fields)
        for tensor, before in self.copies:
            tensor.copy_(before)  # in place: a compiled pass holds on to these tensors


def _cloned(value):
    """Copy the tensors in an attribute of a layer, also those in its dictionaries and tuples."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(part) for key, part in value.items()}
    return type(value)(map(_cloned, value)) if type(value) in (list, tuple) else value


def _overwritten(layer) -> list[torch.Tensor]:
    """Tensors of a layer that a forward pass changes in place; where it assigns new ones, the old ones stay as they are."""
    values = []
    if isinstance(layer, StaticLayer):
        # Keys and values behind the length are overwritten anyhow, but those of a window move.
        moves = isinstance(layer, StaticSlidingWindowLayer)
        values += [value for name, value in vars(layer).items() if moves or not name.endswith(("keys", "values"))]
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        values += [state for states in (layer.conv_states, layer.recurrent_states) for state in states.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]
