"""What the host tells the device about a round, so that it never waits for it: counts by row, and where columns go.

A copy from the host's memory makes the host wait for all of the device's work, unless it is asked for in the right way.

Legend of shapes: B rows.
"""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor to a device, in order with its work, without waiting for it."""
    if values.device.type == "cpu" and device.type == "cuda":  # from other memory the host would wait
        values = values.pin_memory()
    # MPS reads the host's memory later, when it may be gone.
    return values.to(device, non_blocking=device.type != "mps")


class RowShift:
    """How many columns each row moves to the right. The gather index is made once, for all layers and inputs.

    Args:
        behind: (B)
    """

    def __init__(self, behind: torch.LongTensor):
        self.behind, self._sources = behind, {}

    @classmethod
    def of(cls, added: list[int], device: torch.device) -> "RowShift | None":
        """Make rows end together that have kept `added[r]` tokens; None where they do already."""
        most = max(added)
        if min(added) == most:
            return None
        return cls(to_device(torch.tensor([most - count for count in added]), device))

    def source(self, width: int, device: torch.device) -> torch.LongTensor:
        """Return the columns (B, width) that columns 0 to width - 1 come from; 0 for those that become padding."""
        made = self._sources.get(device)
        if made is None or made.shape[1] < width:
            behind = to_device(self.behind, device)[:, None]
            made = self._sources[device] = (torch.arange(width, device=device) - behind).clamp_(min=0)
        return made[:, :width]
