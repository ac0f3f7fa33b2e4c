"""DFlash drafters for transformers: make a target write several tokens a pass, with the same text.

Names are imported when they are first used, so that importing the package costs nothing. From then on `generate` takes drafters
of foreign classes as well.
"""

import importlib
import sys

__version__ = "0.2.0"

_EXPORTS = {
    "DFlashConfig": "configuration_dflash",
    "DFlashDraftModel": "modeling_dflash",
    "DFlashCandidateGenerator": "generation_dflash",
    "Draft": "drafter_draft",
    "Plan": "drafter_draft",
    "Proposer": "drafter_draft",
    "Speculation": "decode_statistics",
    "speculative_generate": "generation_dflash",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)


def _adopt_foreign_drafters():
    """Hand the hook in `generate` what adopts drafters of foreign classes."""
    from .convert import adopting
    from .generation_dflash import install_generate_hook

    install_generate_hook(adopting)


class _WhenGenerateIsImported:
    """Import finder that hands over what adopts foreign drafters as soon as transformers' `generate` has been imported.

    Importing transformers right here would be simpler, and would make `dflash-hub --help` and shell completion wait for it.
    Where a module of this package is what imports `generate`, it is half imported itself, and adopting waits for its end.
    """

    MODULE = "transformers.generation.utils"
    importing = 0  # modules of this package that are half imported

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        own = name.startswith(f"{__name__}.")
        if name != cls.MODULE and not own:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                cls.importing += own
                try:
                    run(module)
                finally:
                    cls.importing -= own
                if cls.MODULE in sys.modules and not cls.importing and cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                    _adopt_foreign_drafters()

            spec.loader.exec_module = exec_module
        return spec


if _WhenGenerateIsImported.MODULE in sys.modules:
    _adopt_foreign_drafters()
else:
    sys.meta_path.insert(0, _WhenGenerateIsImported)
