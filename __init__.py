"""DFlash drafters for transformers: make a target write several tokens a pass, with the same text.

Names are imported when they are first used, so that importing the package costs nothing.
"""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "DFlashConfig": "configuration_dflash",
    "DFlashDraftModel": "modeling_dflash",
    "DFlashCandidateGenerator": "generation_dflash",
    "Speculation": "decode_statistics",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
