"""Forward passes beside a static KV cache: of few lengths, and compiled where plain `generate` compiles its own."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from .target_model import CACHE


@dataclass
class FixedShapes:
    """How forward passes run beside a static KV cache.

    Args:
        length: tokens that the KV cache has room for.
        forward: the target's forward pass.
        compile: turns a function into a compiled one, with the options of this call; None where nothing is compiled.
        runs: passes so far, by their length.
    """

    length: int
    forward: Callable
    compile: Callable | None = None
    runs: Counter = field(default_factory=Counter)

    def warms(self, count: int) -> bool:
        """Count one more pass of `count` tokens: whether its time may be that of compiling, or of recording a CUDA graph."""
        self.runs[count] += 1
        return self.compile is not None and self.runs[count] <= 2

    @classmethod
    def of(
        cls, target: PreTrainedModel, cache: Cache, config: GenerationConfig, length: int, alone: bool
    ) -> "FixedShapes | None":
        """Do as plain `generate` does with this KV cache; None where it is not static.

        Args:
            length: tokens that the cache will hold at most; another call with less keeps the shapes of a larger cache.
            alone: whether no recurrent layer has to be seen at work and no other rank takes part.
        """
        lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
        if not cache.is_compileable or not lengths:
            return None
        # As long as the longest of earlier calls, like plain `generate`'s caches: another length is another shape.
        earlier = getattr(target, "_previous_max_cache_length", 0)
        made = cls(max(length, earlier, *lengths), target)
        if alone and target._valid_auto_compile_criteria({CACHE: cache}, config):
            options = config.compile_config or target._default_compile_config()
            made.forward = target.get_compiled_call(config.compile_config)
            made.compile = functools.partial(torch.compile, **options.to_dict())
        return made
