"""Tell a drafter that does not fit its target: hardly any first token that it drafts is accepted."""

FLOOR, FLOOR_TRIES = 0.1, 20
FLOOR_WARNING = (
    "Of the first tokens that this DFlash drafter proposed, less than one in ten was accepted: the text is right, but drafting "
    "does not make it faster. Likely causes: the target is another revision than the drafter was made for, fine-tuned or "
    "quantized; the prompts lack the chat template that the drafter was trained with, or use the other thinking mode; the "
    "drafter's `target_layer_ids` or `mask_token_id` are not those of its training; or the prompts are unlike its training "
    "data. Try a prompt like those, and compare `drafter.config` with what the drafter's card says."
)


def is_at_floor(tried: int, accepted: int) -> bool:
    """Whether `FLOOR_WARNING` is due: of at least 20 drafts, less than a tenth had their first token accepted.

    A drafter that gets every third first token right is below that in one of 300 runs of 20.

    Args:
        tried, accepted: `first_tried` and `first_accepted` of `DraftStatistics`, or counts of a fixed schedule.
    """
    return tried >= FLOOR_TRIES and accepted < FLOOR * tried
