"""What calls of one drafter with one target learned, kept for the next call: pass times, acceptance, warnings given."""

import weakref

from transformers import PreTrainedModel
from transformers.utils import logging

from .decode_floor import FLOOR_WARNING, is_at_floor
from .decode_schedule import DraftStatistics
from .decode_statistics import Speculation
from .hub_files import nonfinite, nonfinite_sentence

logger = logging.get_logger(__name__)


class ScheduleMemory:
    """What calls with one drafter and one target learned about how many tokens to draft; it dies with either."""

    _OF_PAIR: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()  # drafter -> target -> memory

    def __init__(self):
        self.statistics: DraftStatistics | None = None
        self.prior: list[float] | None = None  # what the drafter's config says that it accepts
        self.devices = None
        self.warned = self.warned_of_logits = False

    @classmethod
    def of(cls, drafter, target: PreTrainedModel) -> "ScheduleMemory":
        memory = cls._OF_PAIR.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, cls())
        if memory.devices != (drafter.device, target.device):
            memory.devices, memory.statistics = (drafter.device, target.device), None
        memory.prior = drafter.config.acceptance_prior
        return memory

    def warn_at_the_floor(self, speculation: Speculation):
        """Once, where nearly no first draft is accepted: over the chosen calls so far, or over this one."""
        rounds = [a for row in zip(speculation.drafted, speculation.accepted) for d, a in zip(*row) if d > 0]
        counts = [(len(rounds), sum(accepted > 0 for accepted in rounds))]
        if self.statistics is not None:
            counts.append((self.statistics.first_tried, self.statistics.first_accepted))
        if not self.warned and any(is_at_floor(*count) for count in counts):
            self.warned = True
            logger.warning(FLOOR_WARNING)

    def warn_of_logits(self, drafter):
        """Once, where a drafter's logits are not finite: say why, as far as that can be seen."""
        if self.warned_of_logits:
            return
        self.warned_of_logits = True
        dtype = str(drafter.dtype).removeprefix("torch.")
        cause = f"the target's hidden states, or the drafter's, leave the range of {dtype}: load both in bfloat16 or float32"
        if names := nonfinite(dict(drafter.named_parameters())):
            cause = nonfinite_sentence(names, "the drafter")
        logger.warning(
            "The logits of this DFlash drafter are not finite, so nothing more is drafted in this call. The text is the target's, "
            f"and takes one forward pass a token. The cause: {cause}"
        )
