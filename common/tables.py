"""Tables in Markdown, and intervals of what they show."""

import itertools
import random
from collections import defaultdict


def bootstrap(prompts: list, statistic, draws: int = 1000) -> tuple[float, float, float]:
    """(value, low, high): a statistic of a list of prompts and its 95% interval over resampled prompts."""
    chooser = random.Random(0)
    values = sorted(statistic(chooser.choices(prompts, k=len(prompts))) for _ in range(draws))
    return statistic(prompts), values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def over_prompts(items: list, prompt_of, statistic) -> tuple[float, float, float]:
    """`bootstrap` over the prompts of texts: turns of one prompt depend on each other, and are drawn together.

    Args:
        prompt_of: the prompt's id of an item.
        statistic: of a list of items.
    """
    prompts = defaultdict(list)
    for item in items:
        prompts[prompt_of(item)].append(item)
    return bootstrap(list(prompts.values()), lambda drawn: statistic(list(itertools.chain(*drawn))))


def interval(value, digits=2) -> str:
    return "-" if value is None else f"{value[0]:.{digits}f} [{value[1]:.{digits}f}, {value[2]:.{digits}f}]"


def table(head: list[str], rows: list[list]) -> str:
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
