"""Checks that a target counts as the loop does: in every forward pass what is free, and once a target what is not.

Free: as many tokens are fed as asked for, as many logits come back, and the cache grows by as many. Once a target, before
the first token: a forward pass of several tokens gives the logits of single tokens, and positions reach the target.

Legend of shapes: B sequences, V vocabulary.
"""

import weakref
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from .target_model import CACHE


def _miscounted(target: PreTrainedModel, asked: int, found: str) -> ValueError:
    return ValueError(
        f"{type(target).__name__} was to read {asked} tokens in one forward pass, but {found}; a DFlash drafter needs a "
        "target that reads every token it is given, and no others. Adapters that learn a prompt (prompt tuning, p-tuning, "
        "prefix tuning) and some image encoders add tokens of their own, and custom code may cut its inputs to the last "
        "token. Call `generate` without `assistant_model`."
    )


def num_fed(model_inputs: dict) -> int:
    """How many tokens a forward pass with these inputs reads in each sequence."""
    ids = model_inputs.get("input_ids")
    return (model_inputs["inputs_embeds"] if ids is None else ids).shape[1]


def check_fed(target: PreTrainedModel, model_inputs: dict, asked: int, cache: Cache | None, held: int):
    """Refuse a target whose `prepare_inputs_for_generation` feeds another number of tokens, or of positions.

    Args:
        cache, held: what the tokens are to be read after, and how many tokens it holds.
    """
    fed = num_fed(model_inputs)
    if model_inputs.get(CACHE) is not cache:  # Phi-3 reads the whole text again at the boundary of its RoPE
        if fed == asked:
            raise ValueError(
                f"{type(target).__name__} dropped its cache in the middle of a text and did not read the text again, as "
                "older transformers do at the boundary of LongRoPE; upgrade transformers, or keep texts shorter."
            )
        asked += held
    if fed != asked:
        raise _miscounted(target, asked, f"its `prepare_inputs_for_generation` feeds {fed}")
    positions = model_inputs.get("position_ids")
    if positions is not None and positions.shape[-1] != asked:
        raise _miscounted(
            target, asked, f"its `prepare_inputs_for_generation` gives {positions.shape[-1]} positions for them"
        )


def check_read(target: PreTrainedModel, model_inputs: dict, outputs, asked: int, held: int):
    """Refuse a target that returns another number of logits, or whose cache, which held `held` tokens, grew otherwise."""
    wanted = asked if "logits_to_keep" in model_inputs else num_fed(model_inputs)
    if outputs.logits.shape[1] != wanted:
        raise _miscounted(target, wanted, f"it returns {outputs.logits.shape[1]} logits")
    check_grown(target, outputs[CACHE], asked, held)


def check_grown(target: PreTrainedModel, cache: Cache, asked: int, held: int):
    """Refuse a target whose cache, which held `held` tokens, did not grow by those it was asked to read."""
    has_keys = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)  # recurrent states do not count
    length = cache.get_seq_length() if has_keys else None
    # A static cache counts on the device, where a look at every round would wait for it.
    if isinstance(length, int) and length != held + asked:
        raise _miscounted(target, asked, f"its cache went from {held} to {length} tokens")


# ------------------------------------------------------------------------------------------------------------------
# Once a target.


@dataclass
class PassCheck:
    """What was seen of a target's forward passes before the first token.

    Args:
        can_rerun: whether its recurrent layers can run again by themselves; true where it has none.
        ragged: whether a sequence may move in the cache: the target counts its positions by the mask and by what it is
            given, not by the cache's columns.
    """

    can_rerun: bool
    ragged: bool


# By target, then by what can change the code that a forward pass takes.
_CHECKS: "weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple, PassCheck]]" = weakref.WeakKeyDictionary()


def checks_of(target: PreTrainedModel) -> dict[tuple, PassCheck]:
    """The checks that this target has passed, kept as long as it lives."""
    return _CHECKS.setdefault(target, {})


def check_block(
    target: PreTrainedModel,
    block: torch.Tensor,
    single: torch.Tensor,
    dtype: torch.dtype,
    recurrent: bool = False,
    attentions: bool = False,
):
    """Refuse a target whose forward pass over several tokens gives other logits than passes over one token each.

    Args:
        block, single: logits (B, 2, V) of the same two tokens, read together and one by one.
        dtype: what the target computes in.
        recurrent: whether the target has recurrent layers, which may start anew.
        attentions: whether it was asked for attentions, for which Falcon takes a path without a causal mask.
    """
    off = difference(block, single)
    # A recurrent layer that starts anew is a smaller mistake the shorter the prompt is.
    exact = torch.finfo(dtype).bits >= 32
    if off < (0.002 if recurrent and exact else tolerance(dtype)):
        return
    name, advice = type(target).__name__, "."
    if recurrent:
        found = f"the recurrent layers of {name} do not go on from their state in a pass of several tokens"
    else:
        found = f"{name} reads several tokens in another way than one by one"
    if attentions:
        found = f"with `output_attentions`, {found}"
        advice = ". Leave `output_attentions` unset, or call `generate` without `assistant_model`."
    raise ValueError(
        f"{found} (its logits are {off:.1%} off those of single tokens), so a DFlash drafter cannot be used with it{advice}"
    )


def tolerance(dtype: torch.dtype) -> float:
    """Return a difference far above what another order of summation makes of the same numbers, and below what a mistake makes."""
    return max(0.02, 2 * torch.finfo(dtype).eps ** 0.5)


def is_same(moved: torch.Tensor, single: torch.Tensor, block: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits (B, 1, V) read from another place in the cache differ no more than rounding explains."""
    rounding = max(4 * difference(block, single), torch.finfo(dtype).eps ** 0.5 / 2, 1e-3)
    return difference(moved, single) < rounding


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance of logits (.., V) relative to their own spread; those that a target masks out do not count."""
    apart = spread = 0.0
    for mine, theirs in zip(found.float(), expected.float()):  # a sequence at a time, as vocabularies are large
        real = theirs > -1e30
        mean = torch.where(real, theirs, 0).sum(-1, keepdim=True) / real.sum(-1, keepdim=True)
        apart += float(torch.where(real, mine - theirs, 0).square().sum())
        spread += float(torch.where(real, theirs - mean, 0).square().sum())
    return (apart / max(spread, 1e-30)) ** 0.5
