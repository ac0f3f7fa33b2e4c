"""The target's cache between passes: what was verified and not accepted leaves it, whatever kind of cache it is.

Decided layer by layer, by what a layer can do: crop itself; be put back and fed again (windows of fixed size); or, for a
recurrent state, be restored to what it was before the pass, whereupon only that layer's mixer runs again over the
accepted tokens. Rows that accepted different counts are moved back to left-padded form.

Legend of shapes: B rows, S columns of a layer's keys, F tokens fed in a pass.
"""

from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .target_recurrent import RecurrentStates, states_of
from .target_shift import RowShift, to_device

# Newer than the oldest supported transformers.
_FP8_LAYER = getattr(cache_utils, "Fp8QuantizedLayer", ())
_DUMMY_LAYER = getattr(cache_utils, "DummyLayer", ())


def cached_length(cache: Cache | None) -> int:
    """Tokens that a cache holds; 0 for one with recurrent states only, which do not count."""
    if cache is None or all(cache.is_linear):
        return 0
    return int(cache.get_seq_length())


def refuse(part, target: PreTrainedModel):
    """Raise the ValueError that names a cache, or a layer of one, that cannot be rolled back."""
    raise ValueError(
        f"the cache of {type(target).__name__} cannot be rolled back to the accepted tokens (a {type(part).__name__} cannot be "
        "put back as it was), so a DFlash drafter cannot be used with it."
    )


def refuse_unknown(cache: Cache, target: PreTrainedModel):
    """Refuse a cache that keeps more than its layers, which are all that is known here."""
    if type(cache).crop is not Cache.crop or type(cache).update is not Cache.update:
        refuse(cache, target)


class CacheRollback:
    """Takes back from a cache, after each pass, what was not accepted.

    Args:
        cache: after the prompt's pass; past recording is switched on where a layer needs it.
        target: its mixers run again where they keep a recurrent state.

    Raises:
        ValueError: a layer cannot be rolled back exactly; names it.
    """

    def __init__(self, cache: Cache, target: PreTrainedModel):
        refuse_unknown(cache, target)
        self.cache, self.target, self.recurrent = cache, target, None
        self.layers = [*cache.layers]
        try:
            if any(states_of(layer, "recurrent_states") for layer in cache.layers):
                self.recurrent = RecurrentStates(cache, target)
            self.parts = [part for layer in cache.layers if (part := self._part(layer)) is not None]
        except BaseException:
            self.close()
            raise
        self.noting = [part for part in self.parts if type(part).before is not _Croppable.before]
        # Passes of few different lengths, where every length may be compiled.
        self.fixed_lengths = bool(cache.is_compileable)
        self.moves_rows = not cache.offloading and all(_moves_rows(layer) for layer in cache.layers)

    def _part(self, layer):
        if isinstance(layer, _DUMMY_LAYER) or not _is_used(layer):
            return None
        if isinstance(layer, _FP8_LAYER):
            return _Fp8(layer)
        if isinstance(layer, QuantizedLayer):
            return _Quantized(layer)
        if isinstance(layer, StaticLayer) and isinstance(layer, LinearAttentionCacheLayerMixin) and not self.recurrent:
            refuse(layer, self.target)  # nothing restores the state beside the keys
        if isinstance(layer, StaticSlidingWindowLayer):
            return _StaticWindow(layer)
        if isinstance(layer, StaticLayer):
            return _Static(layer, self.target)
        if isinstance(layer, LinearAttentionCacheLayerMixin) and self.recurrent:
            # The states are restored; keys beside them are cropped.
            return _KeysOnly(layer) if isinstance(layer, DynamicLayer) else None
        if not layer.is_croppable:
            refuse(layer, self.target)
        return _Dynamic(layer) if type(layer) is DynamicLayer else _Croppable(layer)

    def most_drafts(self, wanted: int, held: int) -> int:
        """How many tokens may be verified beside the anchor without losing what a rejection needs.

        Args:
            held: tokens in the cache.
        """
        return max(min([wanted, *(part.most_fed(held) - 1 for part in self.parts if hasattr(part, "most_fed"))]), 0)

    @contextmanager
    def verifying(self):
        """Around a pass whose tokens may be rejected."""
        for part in self.noting:
            part.before()
        if self.recurrent is None:
            yield
        else:
            with self.recurrent.recorded():
                yield

    def gather(self, fed: int, rows: list[int], held: int):
        """Move some of the `fed` tokens of the last pass to the front of them, where `commit` keeps them.

        Args:
            rows: their indices in the pass, rising. Of one sequence only: a path of a draft tree.
            held: tokens in the cache before the pass.
        """
        index = to_device(torch.tensor(rows), self.target.device)
        for part in self.parts:
            part.gather(fed, index, held)

    def commit(self, fed: int, added: list[int], shift: RowShift | None = None):
        """Keep the first `added[r]` of the `fed` tokens of the last pass.

        Args:
            shift: of rows with different counts. They are moved to the right, so that they end together; see
                `RoundInputs.commit`.
        """
        most = max(added)
        if shift is not None:
            for layer in self.cache.layers:
                move_right(layer, shift, conv=self.recurrent is None)
        for part in self.parts:
            part.commit(fed, most)
        if self.recurrent is not None:
            self.recurrent.commit(fed, added)

    def move(self, behind: torch.Tensor, back: bool = False):
        """Move row r right by `behind[r]` columns, dropping as many of its last tokens; `back` to where a pass began.

        Nothing is lost on the left, so what was moved in the middle of `verifying` can be put back.
        """
        shift = RowShift(behind)
        for layer in self.cache.layers:
            move_right(layer, shift, conv=self.recurrent is None)
        if back:
            self.trim(int(behind.max()))
            for part in self.parts:
                part.commit(0, 0)
        if self.recurrent is not None:
            fed = int(behind.max())
            self.recurrent.commit(fed, [0] * len(behind) if back else (fed - behind).tolist())

    def trim(self, count: int):
        """Drop `count` columns on the left, padding in every row."""
        for layer in self.cache.layers:
            trim_left(layer, count)

    def close(self):
        """Leave the cache as a caller expects it, who may never crop it."""
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
        if self.recurrent is not None:
            self.recurrent.close()


def _is_used(layer) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, (DynamicLayer, StaticLayer)):
        return bool(states_of(layer, "conv_states") or states_of(layer, "recurrent_states"))
    return getattr(layer, "is_initialized", True)


_MOVABLE = {
    "DummyLayer", "DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
}  # fmt: skip


def _moves_rows(layer) -> bool:
    """Whether rows of this layer can be moved apart from each other; subclasses may keep more than is known here."""
    return type(layer).__name__ in _MOVABLE and type(layer).__module__ == cache_utils.__name__


# ------------------------------------------------------------------------------------------------------------------
# One layer's part. `before` is called before a pass, `commit` after it.


class _Croppable:
    """Full, sliding and indexed attention, and convolutions: the layer crops itself."""

    def __init__(self, layer):
        self.layer = layer
        if hasattr(layer, "activate_past_recording"):  # what a rejected draft pushes out of a window comes back
            layer.activate_past_recording()

    def before(self):
        pass

    def last_column(self, fed: int, held: int) -> int:
        """Return the column behind the last token of a pass of `fed` tokens, before which there were `held`."""
        return self.layer.keys.shape[-2]

    def gather(self, fed: int, rows: torch.LongTensor, held: int):
        start = self.last_column(fed, held) - fed
        for states in (self.layer.keys, self.layer.values):  # (1, heads, S, D)
            read = states.narrow(2, start, fed)
            read[:, :, : len(rows)] = read.index_select(2, to_device(rows, states.device))

    def commit(self, fed: int, added: int):
        self.layer.crop(added - fed)


class _Dynamic(_Croppable):
    """Full attention, cropped as the layer would, but faster: with many layers this is the largest part of a round's host time."""

    def commit(self, fed: int, added: int):
        layer, kept = self.layer, self.layer.keys.shape[-2] - fed + added
        layer.keys, layer.values = layer.keys.narrow(-2, 0, kept), layer.values.narrow(-2, 0, kept)


class _KeysOnly(_Croppable):
    """Keys and values of a layer that has recurrent states too."""

    def __init__(self, layer):
        self.layer = layer
        self.crop = DynamicLayer.crop
        if isinstance(layer, DynamicSlidingWindowLayer):
            self.crop = DynamicSlidingWindowLayer.crop
            layer.activate_past_recording()

    def commit(self, fed: int, added: int):
        self.crop(self.layer, added - fed)


class _Static(_Croppable):
    """Fixed room: what is behind the length is overwritten by the next pass."""

    def __init__(self, layer, target: PreTrainedModel):
        self.layer = layer
        if type(layer) is not StaticLayer and not hasattr(layer, "crop"):
            refuse(layer, target)

    def most_fed(self, held: int) -> int:
        return self.layer.max_cache_len - held  # the layer knows its length on the device only

    def last_column(self, fed: int, held: int) -> int:
        return held + fed

    def commit(self, fed: int, added: int):
        if type(self.layer) is StaticLayer or isinstance(self.layer, LinearAttentionCacheLayerMixin):
            self.layer.cumulative_length.sub_(fed - added)  # a state beside the keys is restored
        else:
            self.layer.crop(added - fed)


class _StaticWindow(_Croppable):
    """A window of fixed size: put back as it was, and fed the accepted tokens' keys again."""

    def __init__(self, layer):
        self.layer = layer

    def most_fed(self, held: int) -> int:
        return self.layer.max_cache_len

    def last_column(self, fed: int, held: int) -> int:
        return min(held + fed, self.layer.max_cache_len)

    def before(self):
        layer = self.layer
        self.kept = (layer.keys.clone(), layer.values.clone(), layer.cumulative_length.clone())
        self.length = layer.cumulative_length_int

    def commit(self, fed: int, added: int):
        if added == fed:
            return
        layer = self.layer
        end = self.last_column(fed, self.length)
        new = layer.keys[:, :, end - fed : end].clone(), layer.values[:, :, end - fed : end].clone()
        for now, before in zip((layer.keys, layer.values, layer.cumulative_length), self.kept):
            now.copy_(before)  # in place: a compiled pass holds on to these tensors
        layer.cumulative_length_int = self.length
        if added:
            layer.update(new[0][:, :, :added], new[1][:, :, :added])


class _Quantized(_Croppable):
    """Recent keys are kept as they are until there are enough to quantize; a pass never crosses that point.

    So what is quantized, and when, is what single-token decoding quantizes.
    """

    def __init__(self, layer):
        self.layer = layer

    def most_fed(self, held: int) -> int:
        recent = self.layer.keys.shape[-2] if self.layer.keys.dim() == 4 else 0
        return self.layer.residual_length - 1 - recent

    def commit(self, fed: int, added: int):
        if added < fed:
            self.layer.keys = self.layer.keys[..., : added - fed, :]
            self.layer.values = self.layer.values[..., : added - fed, :]
            self.layer.cumulative_length -= fed - added


class _Fp8(_Croppable):
    """Every key is quantized by itself, with a scale that the prompt fixed."""

    def __init__(self, layer):
        self.layer = layer

    def commit(self, fed: int, added: int):
        if added < fed:
            for name in ("_quantized_keys", "_quantized_values"):
                states, scale = getattr(self.layer, name)
                setattr(self.layer, name, (states[..., : added - fed, :], scale))
            self.layer.cumulative_length -= fed - added


# ------------------------------------------------------------------------------------------------------------------
# Rows. A layer's columns end together in every row; rows that hold fewer tokens have padding on the left.


def move_right(layer, shift: RowShift, conv: bool):
    """Move the rows of a layer to the right.

    What is moved out are tokens that were not accepted; what appears on the left is padding, which masks hide. This
    copies the layer's keys and values once.

    Args:
        conv: whether the inputs of convolutions are moved too.
    """
    for holder, name, dim, rows_dim in tensors_by_column(layer, conv):
        states = holder[name]
        index = shift.source(states.shape[dim], states.device)
        shape = [1] * states.ndim
        shape[rows_dim], shape[dim] = index.shape
        holder[name] = states.gather(dim, index.view(shape).expand_as(states))


def trim_left(layer, count: int):
    """Drop `count` columns on the left; a sliding layer has dropped those beyond its window already."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length -= count
        stored = min(layer.cumulative_length, layer.sliding_window - 1)
        layer.keys, layer.values = (
            states[..., states.shape[-2] - stored :, :] for states in (layer.keys, layer.values)
        )
        return
    for holder, name, dim, _ in tensors_by_column(layer, conv=False):
        holder[name] = holder[name].narrow(dim, count, holder[name].shape[dim] - count)


def tensors_by_column(layer, conv: bool):
    """Yield (holder, name, dimension of the tokens, dimension of the rows) of each tensor that has one column a token."""
    if isinstance(layer, _DUMMY_LAYER) or not _is_used(layer):
        return
    own = layer.__dict__
    if isinstance(layer, DynamicLayer):
        yield own, "keys", 2, 0
        yield own, "values", 2, 0
    if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
        yield own, "indexer_keys", 1, 0
        if own.get("indexer_position_ids") is not None:
            yield own, "indexer_position_ids", 2, 1
    if conv and isinstance(layer, LinearAttentionCacheLayerMixin):
        for key, state in states_of(layer, "conv_states").items():
            yield layer.conv_states, key, state.ndim - 1, 0
