"""Recurrent states of the target: restored to what they were before a forward pass, and brought up to the accepted tokens.

A layer's mixer runs again over the accepted tokens by itself; no forward pass of the target is needed.

Legend of shapes: B sequences, F tokens fed in a pass.
"""

import copy
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from .target_shift import to_device


def states_of(layer, name: str) -> dict[int, torch.Tensor]:
    """Return the states of a layer that hold something, by their index."""
    return {i: state for i, state in getattr(layer, name, {}).items() if state is not None}


class RecurrentStates:
    """Restores recurrent states and runs their mixers again over what was accepted; no target pass is needed.

    A mixer is found by what it does: it is the module at work when the cache is asked to take a new state. Its inputs
    are recorded by hooks that heed this cache only, so calls of other threads are not mistaken for ours.
    """

    def __init__(self, cache: Cache, target: PreTrainedModel):
        self.cache = cache
        self.layers = {
            i: layer
            for i, layer in enumerate(cache.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            and (states_of(layer, "conv_states") or states_of(layer, "recurrent_states"))
        }
        self.modules = [m for m in target.modules() if getattr(m, "layer_idx", None) in self.layers]
        self.before: dict[int, dict[str, dict[int, torch.Tensor]]] = {}
        self.at_work: dict[int, tuple] = {}  # the newest call with this cache, by layer
        self.calls: dict[int, tuple] = {}  # the call that changed the state
        for i, layer in self.layers.items():
            for name in ("update_conv_state", "update_recurrent_state"):
                setattr(layer, name, self._noted(i, getattr(layer, name)))

    def _noted(self, i: int, update):
        def noted(*args, **kwargs):
            self.calls[i] = self.at_work.get(i)
            return update(*args, **kwargs)

        return noted

    @property
    def can_rerun(self) -> bool:
        """Whether the last pass showed the mixer of every layer. A compiled target, for one, may not."""
        return all(self.calls.get(i) is not None for i in self.layers)

    @contextmanager
    def recorded(self):
        """Keep the states as they are, and record the mixers' inputs during the pass inside."""
        self.before = {
            i: {name: {k: s.clone() for k, s in states_of(layer, name).items()} for name in _STATES}
            for i, layer in self.layers.items()
        }
        self.at_work, self.calls = {}, {}

        def record(module, args, kwargs=None):  # torch may call without kwargs a hook that is being removed
            if kwargs is not None and any(value is self.cache for value in (*args, *kwargs.values())):
                self.at_work[module.layer_idx] = (module, args, kwargs)

        hooks = []
        try:
            for module in self.modules:
                hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def commit(self, fed: int, added: list[int]):
        """States after the first `added[r]` of the `fed` tokens of row r; rows of equal count run together."""
        # A slice of all rows copies nothing. Lists of rows are brought to the device once, for all layers.
        groups = {count: [r for r, a in enumerate(added) if a == count] for count in set(added) - {fed}}
        chosen = {}
        for i, layer in self.layers.items():
            if layer.record_past:  # a layer with a sliding window beside the state
                for k, state in states_of(layer, "conv_states").items():
                    layer.conv_states[k] = state[..., -layer.conv_kernel_size[k] :]
            device = next(s for states in self.before[i].values() for s in states.values()).device
            for count, rows in groups.items():
                if len(rows) == len(added):
                    chosen[count, device] = slice(None)
                elif (count, device) not in chosen:
                    chosen[count, device] = to_device(torch.tensor(rows), device)
                self._restore(i, layer, chosen[count, device], fed, count)

    def _restore(self, i: int, layer, rows: slice | torch.LongTensor, fed: int, count: int):
        states = {name: {k: s[rows] for k, s in self.before[i][name].items()} for name in _STATES}
        if count:
            states = self._rerun(i, layer, states, rows, fed, count)
        for name in _STATES:
            for k, state in states[name].items():
                getattr(layer, name)[k][rows] = state  # in place: the layer's tensors may be of a compiled pass

    def _rerun(self, i: int, layer, states: dict, rows: slice | torch.LongTensor, fed: int, count: int) -> dict:
        alone = copy.copy(layer)
        for name in ("update_conv_state", "update_recurrent_state"):
            del alone.__dict__[name]
        alone.__dict__.update(
            {k: dict(v) if isinstance(v, dict) else v for k, v in layer.__dict__.items() if k in _OWN}
        )
        alone.record_past = False
        for name in _STATES:
            getattr(alone, name).update(states[name])
        cache = copy.copy(self.cache)
        cache.layers = [*self.cache.layers]
        cache.layers[i] = alone

        batch = next(iter(next(s for s in self.before[i].values() if s).values())).shape[0]

        def cut(value):
            if value is self.cache:
                return cache
            if isinstance(value, (tuple, list)):
                return type(value)(cut(part) for part in value)
            if isinstance(value, torch.Tensor) and value.ndim > 1:
                if value.shape[1] == fed:
                    value = value[:, :count]
                if value.shape[0] == batch:
                    value = value[rows]
            return value

        module, args, kwargs = self.calls[i]
        module(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
        return {name: states_of(alone, name) for name in _STATES}

    def close(self):
        for layer in self.layers.values():
            for name in ("update_conv_state", "update_recurrent_state"):
                layer.__dict__.pop(name, None)


_STATES = ("conv_states", "recurrent_states")
_OWN = (
    *_STATES, "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size",
)  # fmt: skip
