"""What `regenerate` will take, said before it starts: tokens, time, memory and disk."""

import shutil
from pathlib import Path

from ..common.console import duration, size
from ..common.provenance import peak_bytes

TRIAL_TOKENS = 8  # generated for each prompt of the first batch
TOKEN_BYTES = 7  # of a token id in a file of responses, its comma included


def forecast_answers(source, batches: list[list[list[int]]], output: Path) -> str:
    """Say what the first turns will take.

    Args:
        source: `LocalTarget`, whose speed is measured, or `RemoteTarget`.
        batches: token ids of the prompts.
    """
    prompts = [ids for batch in batches for ids in batch]
    limit, read = source.limit, sum(map(len, prompts))
    lines = [
        f"{len(prompts)} prompts of {read:,} tokens, at most {len(prompts) * limit:,} tokens of responses ({limit} each)"
    ]
    speed = source.tokens_per_second(batches[0], TRIAL_TOKENS)
    if speed is None:
        lines.append("time: the server's; lines of progress will say how fast it is")
    else:
        longest = duration(len(prompts) * limit / speed)
        lines.append(f"time: at most {longest} ({speed:.0f} tokens/s, measured on a few tokens of the first batch)")
        lines.append(f"memory: {size(peak_bytes())} until now; the KV cache grows with the responses of a batch")
    lines.append(f"disk: at most {size((read + len(prompts) * limit) * TOKEN_BYTES)} in {output}, {free(output)}")
    return "\n".join(lines)


def free(path: Path) -> str:
    """How much room there is where a path is, or will be."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return f"where {size(shutil.disk_usage(there).free)} are free"
