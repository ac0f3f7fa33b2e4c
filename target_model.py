"""What is taken from a target, and what its passes need, whatever its family and the version of transformers."""

import copy
import weakref
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import utils as generation_utils
from transformers.utils import output_capturing

from .target_shift import RowShift, to_device

# Where the supported versions of transformers differ:
# the cache's name in calls and outputs.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"  # 5.24
# Whether a list in `output_hidden_states` counts the embedding's output as index 0.
COUNTS_EMBEDDING = hasattr(output_capturing, "selected_hidden_states")  # 5.23
# By target: asking its config takes as long as several small kernels.
_NUM_LAYERS: "weakref.WeakKeyDictionary[PreTrainedModel, int]" = weakref.WeakKeyDictionary()
# What takes the features of some placeholders out of an encoder's output.
_SLICE = getattr(generation_utils, "_slice_mm_encoder_output", None)  # 5.24


def hidden_states_request(target_layer_ids: list[int]) -> list[int]:
    """Return the `output_hidden_states` that makes a target keep the outputs of these layers, and of no others."""
    return [i + COUNTS_EMBEDDING for i in target_layer_ids]


def target_hidden_states(
    hidden_states: tuple, target: PreTrainedModel, target_layer_ids: list[int]
) -> list[torch.Tensor]:
    """Return the outputs (B, length, H) of the target layers, from what the target returned for `hidden_states_request`.

    Raises:
        ValueError: the target's layers do not have one output of the model's width each.
    """
    layers = _NUM_LAYERS.get(target)
    if layers is None:
        layers = _NUM_LAYERS[target] = target.config.get_text_config(decoder=True).num_hidden_layers
    offset = len(hidden_states) - layers  # 1 where index 0 is the embedding's output; some targets ignore the list
    if offset not in (0, 1):
        raise ValueError(
            f"{type(target).__name__} returns {len(hidden_states)} hidden states for {layers} layers, so it is not clear which "
            "are those of the target layers; a DFlash drafter cannot be used with it."
        )
    states = [hidden_states[i + offset] for i in target_layer_ids]
    # A target that heeds the list has a place for every index of it, unless it skips a layer: then they mean other layers.
    shifted = any(state is None for state in hidden_states) and offset != COUNTS_EMBEDDING
    if shifted or any(state is None for state in states):
        raise ValueError(
            f"{type(target).__name__} did not run all of the layers {target_layer_ids} (it may skip some for this input), so a "
            "DFlash drafter cannot be used with it."
        )
    if states[0].ndim != 3:
        raise ValueError(
            f"{type(target).__name__} has hidden states of shape {tuple(states[0].shape)}, more than one vector a token; a "
            "DFlash drafter cannot be used with it."
        )
    return states


MEDIA = ("image", "video", "audio")


def holds_media(target: PreTrainedModel, ids: torch.LongTensor) -> bool:
    """Whether placeholders are among the tokens, whose features are not known from the tokens alone."""
    tokens = [getattr(target.config, f"{kind}_token_id", None) for kind in MEDIA]
    return any(token is not None and bool((ids == token).any()) for token in tokens)


def encoder_outputs_by_chunk(
    target: PreTrainedModel, encoded: dict | None, ids: torch.LongTensor, chunks: tuple
) -> list[dict]:
    """What each chunk of a prompt (B, new) is fed of images and the like that were encoded beforehand.

    Row i of an output fills the i-th placeholder, counted over rows and tokens.
    """
    inputs = [{} for _ in chunks]
    for kind, output in (encoded or {}).items():
        if output is None:
            continue
        if _SLICE is None:
            raise ValueError(f"`prefill_chunk_size` cannot split the encoded {kind} into chunks; leave it unset.")
        places = ids == getattr(target.config, f"{kind}_token_id")
        order = places.flatten().cumsum(0).view_as(places) - 1
        start = 0
        for chunk, own in zip(chunks, inputs):
            end = start + chunk.shape[1]
            if places[:, start:end].any():
                part = _SLICE(output, order[:, start:end][places[:, start:end]])
                own.setdefault("mm_encoder_outputs", {})[kind] = part
            start = end
    return inputs


def embedding_rows(target: PreTrainedModel) -> int:
    """How many tokens the target can embed. A resized or padded embedding has other rows than the config says."""
    embedding = target.get_input_embeddings()
    return getattr(embedding, "num_embeddings", target.config.get_text_config(decoder=True).vocab_size)


def embedding_width(target: PreTrainedModel) -> int:
    embedding = target.get_input_embeddings()
    return getattr(embedding, "embedding_dim", target.config.get_text_config(decoder=True).hidden_size)


def device_of(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a module computes: with its tensors, or where accelerate's hooks bring offloaded ones; else `otherwise`."""
    tensors = [*module.parameters(), *module.buffers()]
    if tensors and not tensors[0].is_meta:
        return tensors[0].device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(device) for device in devices if device is not None), otherwise)


def raw_embeddings(embedding: nn.Module, ids: torch.LongTensor) -> torch.Tensor:
    """The target's embeddings of `ids` as stored: drafters are trained on them before the target scales or norms them."""
    if not (hasattr(embedding, "embed_scale") or hasattr(embedding, "embed_norm")):
        return embedding(ids)
    if hasattr(embedding.weight, "device_mesh"):  # each rank holds a part of the rows, and has the same ids
        from torch.distributed.tensor import DTensor, Replicate

        ids = DTensor.from_local(ids, embedding.weight.device_mesh, [Replicate()], run_check=False)
        return nn.Embedding.forward(embedding, ids).full_tensor()
    return nn.Embedding.forward(embedding, ids)


@contextmanager
def contiguous_head(target: PreTrainedModel, states_only: bool = False):
    """Hand the LM head contiguous hidden states in the forward passes inside.

    A prefill gives it the last position of several sequences, a slice. torch multiplies such a slice sequence by sequence, with a
    copy of the whole weight each: on a CPU in bfloat16 that takes a hundred times as long.

    Args:
        states_only: whether nobody reads the logits; a dense head is given no position at all then.
    """
    head = target.get_output_embeddings()
    none = states_only and type(head) is nn.Linear

    def contiguous(module, args):
        hidden = args[0][..., :0, :] if none else args[0]
        return hidden.contiguous(), *args[1:]

    hook = head.register_forward_pre_hook(contiguous) if head is not None else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def check_pair(drafter, target: PreTrainedModel):
    """Refuse a drafter that was not made for this target; a wrong pair would run, and draft badly.

    Raises:
        ValueError: names both models and both numbers.
    """
    config = drafter.config
    hooked = any(hasattr(module, "_hf_hook") for module in drafter.modules())  # offloaded weights come for a call
    if not hooked and (empty := [name for name, weight in drafter.named_parameters() if weight.is_meta]):
        raise ValueError(
            f"the drafter has no weights: {empty[0]} and others are on the meta device. Load it with `from_pretrained`, outside of "
            "`torch.device('meta')` and `init_empty_weights`."
        )
    text = target.config.get_text_config(decoder=True)
    pair = (
        f"The drafter {config.name_or_path or type(drafter).__name__!r} does not fit the target "
        f"{target.config.name_or_path or type(target).__name__!r}"
    )
    for what, wanted, found in (
        ("hidden size", config.hidden_size, text.hidden_size),
        ("number of layers", config.num_target_layers, text.num_hidden_layers),
    ):
        if wanted != found:
            raise ValueError(f"{pair}: it was made for a {what} of {wanted}, the target's is {found}.")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{pair}: the target has no LM head to borrow.")
    width = embedding_width(target)
    if width != config.hidden_size:
        raise ValueError(f"{pair}: it takes embeddings of width {config.hidden_size}, the target's have {width}.")
    rows = embedding_rows(target)
    if rows < config.vocab_size:
        raise ValueError(
            f"{pair}: it was made for a vocabulary of {config.vocab_size}, the target embeds {rows} tokens."
        )


class RoundInputs:
    """The target's inputs beside its tokens. Those with one value a token continue the prompt's, in growing buffers.

    Columns are those of the cache: as the text's while all rows advance together, behind what was passed in a cache; rows
    that advance by different counts are moved apart, see `commit`.

    Args:
        model_kwargs: as prepared by `generate`, without the cache.
        rows, length: of the tokens, as the caller sees them.
        columns: tokens that the cache holds after the prompt's pass.
    """

    PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

    def __init__(self, model_kwargs: dict, rows: int, length: int, columns: int, device: torch.device):
        self.columns = columns
        self.grown = {
            name: _fitted(model_kwargs[name], columns) for name in self.PER_TOKEN if model_kwargs.get(name) is not None
        }
        left_out = (*self.PER_TOKEN, CACHE, "inputs_embeds")
        self.fixed = {name: value for name, value in model_kwargs.items() if name not in left_out}
        mask, positions = self.grown.get("attention_mask"), self.grown.get("position_ids")
        if positions is not None:  # the caller may count positions from anywhere
            last = positions[..., -1].reshape(-1, positions.shape[-2]).amax(dim=0).expand(rows)
        elif mask is not None:
            last = mask.sum(dim=1) - 1
        else:
            last = torch.full((rows,), columns - 1)
        # A text token's index in its row is ahead of its position by this.
        self.offsets = [length - 1 - position for position in last.tolist()]
        self.padding = [0] * rows if mask is None else (mask.cumsum(1) == 0).sum(1).tolist()
        self.rows, self.device = rows, device

    def set_apart(self):
        """Prepare for rows that advance by different counts: everything per token has one line a row."""
        if "attention_mask" not in self.grown:
            self.grown["attention_mask"] = torch.ones(self.rows, self.columns, dtype=torch.long, device=self.device)
        for name, values in self.grown.items():
            self.grown[name] = values.expand(*values.shape[:-2], self.rows, values.shape[-1])

    def moved(self, behind: list[int], fed: int) -> "RoundInputs":
        """These inputs after a pass of `fed` tokens of which row r kept `fed - behind[r]`; its own stay as they are."""
        other = copy.copy(self)
        other.grown, other.padding = dict(self.grown), [0] * self.rows
        other.set_apart()
        other.ahead(fed, None)  # fills the buffers up to the pass's end
        counts = [fed - count for count in behind]
        other.commit(counts, RowShift.of(counts, self.device))
        return other

    def position(self, length: int, row: int) -> int:
        """Position of the last of `length` tokens of a row."""
        return length - 1 - self.offsets[row]

    def ahead(self, count: int, cache, resting: list[int] = ()) -> dict:
        """Keyword arguments for a pass over the next `count` tokens; `resting` rows have no more of their own."""
        inputs = self.fixed | {CACHE: cache}
        length = self.columns + count
        for name, values in self.grown.items():
            if values.shape[-1] < length:
                values = self.grown[name] = torch.cat([values, self._continued(name, values, length)], dim=-1)
            inputs[name] = values[..., :length]
        for row in resting:  # they see what they hold, at a position that exists, and are not seen
            inputs["attention_mask"][row, self.columns :] = 0
            if "position_ids" in inputs:
                held = inputs["position_ids"][..., row, self.columns - 1 : self.columns]
                inputs["position_ids"][..., row, self.columns :] = held
        return inputs

    def commit(self, added: list[int], shift: RowShift | None = None) -> int:
        """Count what the cache keeps. Returns how many columns are padding in every row now, dropped here already.

        Args:
            shift: of rows with different counts.
        """
        most = max(added)
        end = self.columns + most
        if shift is None:
            self.columns = end
            return 0
        padding = [pad + most - count for pad, count in zip(self.padding, added)]
        trim = min(padding)
        for name, values in self.grown.items():  # with what is continued behind the end, row by row
            index = shift.source(values.shape[-1], values.device)
            moved = values.gather(-1, index.expand(values.shape))
            if name == "attention_mask":
                column = torch.arange(most, device=values.device)
                moved[:, :most].masked_fill_(column < to_device(shift.behind, values.device)[:, None], 0)
            self.grown[name] = moved[..., trim:]
        self.padding = [pad - trim for pad in padding]
        self.columns = end - trim
        return trim

    @staticmethod
    def _continued(name: str, values: torch.Tensor, length: int) -> torch.Tensor:
        count = max(values.shape[-1], length - values.shape[-1], 256)
        last = values[..., -1:]
        if name == "position_ids":
            return last + torch.arange(1, count + 1, device=values.device)
        if name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
            last = torch.zeros_like(last)  # what is generated is text
        elif name == "attention_mask":
            last = torch.ones_like(last)
        return last.expand(*last.shape[:-1], count)


def _fitted(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Values of the last tokens, with as many columns as the cache has; those on the left are in it already."""
    missing = columns - values.shape[-1]
    if missing > 0:
        return torch.cat([values[..., :1].expand(*values.shape[:-1], missing), values], dim=-1)
    return values[..., -columns:]


class PassLimits:
    """Positions that a pass of several tokens may not cross; plain decoding crosses them with a pass of one token.

    - The end of the position table, where a target has one: a draft may reach past it although the text ends before.
    - LongRoPE takes other factors for a whole pass that reaches beyond its original length.
    - Dynamic NTK takes another base for every length beyond the table, so nothing is drafted there. Nor does a draft reach the
      table's last position: in a pass up to it the base is that of the pass before, which may be a processor's own.
    """

    def __init__(self, target: PreTrainedModel):
        config = target.config.get_text_config(decoder=True)
        table = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        ropes = [value for value in rope.values() if isinstance(value, dict)] or [rope]
        self.limits = [r["original_max_position_embeddings"] for r in ropes if r.get("rope_type") == "longrope"]
        dynamic = any("dynamic" in (r.get("rope_type") or "") for r in ropes)
        self.limits += [table - dynamic] if isinstance(table, int) else []
        self.last = table - 1 if dynamic else None
        # The longest row of a batch then decides for all.
        self.by_length = self.last is not None or any(r.get("rope_type") == "longrope" for r in ropes)

    def most_drafts(self, position: int, wanted: int) -> int:
        """How many tokens may be verified together with the anchor at `position`."""
        if self.past_drafting(position):
            return 0
        return min([wanted, *(limit - 1 - position for limit in self.limits if position < limit)])

    def past_drafting(self, position: int) -> bool:
        return self.last is not None and position >= self.last
