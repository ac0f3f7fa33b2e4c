"""The parts that a drafter of a method has, in the sizes that are usual."""

import math

# As in the published drafters.
TAPS, GROUP, RANK, CANDIDATES = 2, 16, 256, 16
METHODS = ("dflash", "dflash2")


def parts_of(
    method: str, hidden_size: int, vocab_size: int, convolution: bool = True, selector: bool = True, rank: int = RANK
) -> dict[str, int]:
    """Return the numbers of the parts that a drafter of a method has, in the sizes that are usual.

    Raises:
        ValueError: there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"--method {method!r} is none of {', '.join(METHODS)}.")
    fields = {}
    if method == "dflash2" and convolution:
        fields |= {"conv_kernel_size": TAPS, "conv_group_size": math.gcd(GROUP, hidden_size)}
    if method == "dflash2" and selector:
        fields |= {"selector_rank": rank, "selector_top_k": min(CANDIDATES, vocab_size)}
    return fields
