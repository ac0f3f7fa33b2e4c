"""A few rows of a target's embedding and LM head, kept with a drafter, by which it knows its target again.

Another dtype and a quantized copy have nearly the same rows, a fine-tuned target has similar ones, and another model of the
same shape has others. Rows are compared around their mean: what all rows share says little of a model.

Legend of shapes: R sampled rows, W sampled columns, V vocabulary, H hidden.
"""

import base64
import weakref

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .target_model import device_of, raw_embeddings
from .target_ranks import sharding

logger = logging.get_logger(__name__)

ROWS, COLUMNS = 8, 32
# Cosines from which on rows count as the same: rounding to 8 bits leaves 0.9999, to 4 bits 0.99.
SAME, SAME_COARSE = 0.9995, 0.985
# And below which they are another model's: independent rows have 0, within 0.1.
OTHER = 0.5

# Drafter -> the targets that it was compared with.
_SEEN: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@torch.no_grad()
def sampled_rows(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """Read rows of embedding and head, (2, R, W) in float32 on the CPU. Both are called: a packed head has no dense weight.

    Args:
        vocab_size: of the drafter, over which the rows are spread; the target may have been resized since.
    """
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    ids = (2 * torch.arange(ROWS) + 1) * vocab_size // (2 * ROWS)
    places = device_of(embedding, target.device), device_of(head, target.device)
    rows = raw_embeddings(embedding, ids.to(places[0]))  # (R, H)
    width = rows.shape[-1]
    start = max(width - COLUMNS, 0) // 2  # neighbors, as quantization shares a scale between them
    # A unit vector as hidden state gives a column of the head's weight; nothing gives its bias.
    units = torch.zeros(min(COLUMNS, width) + 1, width, dtype=target.dtype, device=places[1])
    units[:-1].diagonal(start).fill_(1)
    columns = head(units)  # (W + 1, V)
    columns = (columns[:-1] - columns[-1:])[:, ids.to(columns.device)]
    return torch.stack([rows[:, start : start + COLUMNS].float().cpu(), columns.T.float().cpu()])


def encoded_rows(target: PreTrainedModel, vocab_size: int) -> str | None:
    """Return the sampled rows for a config: float16 by base64. None for a target whose rows lie on several processes."""
    if sharding(target) is not None:
        return None
    rows = sampled_rows(target, vocab_size)
    rows = (rows / rows.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-30)).half()
    return base64.b64encode(rows.numpy().tobytes()).decode()


def decoded_rows(text: str) -> torch.Tensor:
    """(2, R, W) in float32.

    Raises:
        ValueError: the text is not what `encoded_rows` returns.
    """
    data = base64.b64decode(text, validate=True)
    if not data or len(data) % (4 * ROWS):
        raise ValueError(f"{len(data)} bytes are no rows of an embedding and a head.")
    return torch.frombuffer(bytearray(data), dtype=torch.float16).view(2, ROWS, -1).float()


def cosines(kept: torch.Tensor, found: torch.Tensor) -> list[float]:
    """Cosine of the rows (2, R, W) of embedding and head, around the mean of the rows."""
    kept, found = (rows - rows.mean(dim=1, keepdim=True) for rows in (kept, found))
    return torch.cosine_similarity(kept.flatten(1), found.flatten(1), dim=1).tolist()


def is_coarse(rows: torch.Tensor) -> bool:
    """Whether rows (R, W) hold so few values that they were rounded to 4 bits, also where they are stored in a wider type."""
    distinct = sorted(len(row.unique()) for row in rows)
    return distinct[len(distinct) // 2] <= COLUMNS // 2 + 1


def compare_target(config, target: PreTrainedModel) -> tuple[list[float], bool | None] | None:
    """([cosine of the embedding's rows, of the head's], verdict): True for the same weights, None for related ones, False for
    another model. None where the drafter keeps no rows, or those of the target lie on several processes.
    """
    if config.target_rows is None or sharding(target) is not None:
        return None
    kept, found = decoded_rows(config.target_rows), sampled_rows(target, config.vocab_size)
    alike = cosines(kept, found)
    if max(alike) < OTHER:
        return alike, False
    bars = [SAME_COARSE if any(map(is_coarse, pair)) else SAME for pair in zip(kept, found)]
    return alike, True if all(cosine >= bar for cosine, bar in zip(alike, bars)) else None


def check_identity(drafter, target: PreTrainedModel):
    """Compare, in the first call of a pair, the target's rows with those that the drafter keeps.

    Raises:
        ValueError: the target is another model of the same shape; names both.
    """
    seen = _SEEN.setdefault(drafter, weakref.WeakSet())
    if target in seen:
        return
    compared = compare_target(drafter.config, target)
    if compared is not None:
        (embedding, head), same = compared
        made_for = drafter.config.target_name_or_path or "another target"
        name = target.config.name_or_path or type(target).__name__
        figures = f"rows of its embedding and LM head have cosines of {embedding:.4f} and {head:.4f} with those that were kept"
        if same is False:
            raise ValueError(
                f"the drafter was made for {made_for}, and {name} is another model: {figures}. Load the target that the drafter was "
                "made for, or train a drafter for this one (`dflash-hub train`)."
            )
        if same is None:
            logger.warning(
                f"The drafter was made for other weights of {made_for} than {name} has (fine-tuned or merged, perhaps): {figures}. The "
                "output is the target's, but fewer draft tokens may be accepted. `dflash-hub check` measures it, `dflash-hub align` "
                "adapts the drafter."
            )
    seen.add(target)
