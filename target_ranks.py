"""The processes that share one target: how its weights are spread over them, and how they come to one decision.

With tensor parallelism each process (rank) holds a part of every weight, and all of them run each forward pass together. So they must
feed the same tokens in passes of the same length, and stop at the same token. Yet each rank reads a clock, a random number
generator and an argmax of its own, and these differ. Here the first rank's values become everyone's.
"""

from contextlib import contextmanager

import torch
from torch import distributed
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

TENSOR_PARALLELISM = "tensor parallelism"


def sharding(target: PreTrainedModel) -> str | None:
    """Name what spreads the target's weights over processes; None where each process holds all of them."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    if is_deepspeed_zero3_enabled() or any(hasattr(parameter, "ds_id") for parameter in target.parameters()):
        return "DeepSpeed ZeRO-3"
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wrappers = (FSDPModule, FullyShardedDataParallel)
    if is_fsdp_managed_module(target) or any(isinstance(module, wrappers) for module in target.modules()):
        return "FSDP"
    if getattr(target, "_pp_stage", None) is not None:
        return "pipeline parallelism"
    return None if _mesh(target) is None else TENSOR_PARALLELISM


def _mesh(target: PreTrainedModel):
    """The device mesh of the ranks that share each weight; None where there is none."""
    from torch.distributed.tensor import DTensor

    mesh = getattr(target, "_device_mesh", None)
    if mesh is None:  # parallelized by torch's own functions
        mesh = next((weight.device_mesh for weight in target.parameters() if isinstance(weight, DTensor)), None)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    return None if mesh is None or mesh.size() == 1 else mesh


class TargetRanks:
    """Gives all ranks that share a target the first rank's decisions. Without tensor parallelism nothing is exchanged.

    Args:
        target: of this call.
        sequences: in the batch; so many integers can be agreed on at once.
    """

    def __init__(self, target: PreTrainedModel, sequences: int):
        self.group = _mesh(target).get_group() if sharding(target) == TENSOR_PARALLELISM else None
        self.shared = self.group is not None
        self.rank = distributed.get_rank(self.group) if self.shared else 0
        self.count = distributed.get_world_size(self.group) if self.shared else 1
        self.device, self.sequences = target.device, sequences

    @property
    def first(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's `values`, on every rank. They stay on the device, so nothing waits."""
        if not self.shared:
            return values
        shared = values.to(self.device).contiguous()
        distributed.broadcast(shared, group=self.group, group_src=0)
        return shared.to(values.device)

    def agree(self, values: list[int]) -> list[int]:
        """The first rank's `values`, on every rank; at most one a sequence, as many on every rank.

        Raises:
            RuntimeError: another rank has stopped with an error, see `alone`.
        """
        if not self.shared:
            return values
        padded = [*values, *[0] * (self.sequences - len(values))]
        heard = self._exchange([0] * self.count + (padded if self.first else [0] * self.sequences))
        if any(heard[: self.count]):
            raise RankStopped(
                f"`generate` stopped on rank {heard.index(1)} of the {self.count} that share this target, with an error that is "
                "raised there. All ranks stop together, so that none waits for another."
            )
        return heard[self.count : self.count + len(values)]

    @contextmanager
    def alone(self):
        """Around work that each rank does by itself, a streamer's for one: its error stops the other ranks at their next `agree`."""
        try:
            yield
        except RankStopped:
            raise
        except BaseException:
            if self.shared:
                self._exchange([int(rank == self.rank) for rank in range(self.count)] + [0] * self.sequences)
            raise

    def _exchange(self, message: list[int]) -> list[int]:
        """The sum of all ranks' messages. They have one length, so an error meets whatever the others agree on."""
        message = torch.tensor(message, device=self.device)
        distributed.all_reduce(message, group=self.group)
        return message.tolist()

    def check_call(self, facts: dict[str, int]):
        """Refuse a call that is not the same on every rank, where plain `generate` would hang or write nonsense.

        Args:
            facts: of the call on this rank, by the name that the error gives them.

        Raises:
            ValueError: on every rank; names what differs.
        """
        if not self.shared:
            return
        own = torch.tensor([*facts.values()], device=self.device)
        all_ranks = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(all_ranks, own, group=self.group)
        by_rank = zip(*(values.tolist() for values in all_ranks))
        if different := {name: values for name, values in zip(facts, by_rank) if len(set(values)) > 1}:
            found = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in different.items())
            raise ValueError(
                f"the {self.count} ranks that share this target were given different calls of `generate` ({found}, by rank). Pass "
                "the same arguments on all of them; a streamer of a single sequence may be on some."
            )


class RankStopped(RuntimeError):
    """Another rank that shares the target has stopped with an error."""
