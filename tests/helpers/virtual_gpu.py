"""A GPU that is none, to see on any machine where tensors are put.

Its tensors say that they are on the device `virtual`; their values lie on the CPU, where every operation runs. As on a GPU, an
operation on tensors of two devices is an error, and a copy has to be asked for. What makes the host wait for the device is counted:
reads, and copies to the device, unless these are told not to block.
It is torch's own way to write a backend in Python (PrivateUse1), which is experimental, and stays for good in the process that imports this file.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

backend_registration._setup_privateuseone_for_python_backend("virtual")
torch.virtual.get_amp_supported_dtype = lambda: [torch.bfloat16]
DEVICE = torch.device("virtual", 0)

aten = torch.ops.aten
COPIES = (aten._to_copy, aten.copy_)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)  # with indices of the host, if need be
WAITING = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2)


class VirtualTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, held: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: torch.Tensor):
        self.held = held

    def __repr__(self, **kwargs):
        return f"VirtualTensor({self.held})"

    def tolist(self):
        VirtualGPU.current.read()
        return self.held.tolist()

    def numpy(self, **kwargs):
        raise TypeError("a tensor of a GPU has no numpy array; copy it to the host with Tensor.cpu() first.")

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return VirtualGPU.current.dispatch(op, args, kwargs or {})


class VirtualGPU(TorchDispatchMode):
    """In this context `.to("virtual")` works, and `reads` and `copies` (to the device) count by place what waits for it."""

    current: "VirtualGPU | None" = None

    def __init__(self):
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.patches = ExitStack()

    def __enter__(self):
        VirtualGPU.current = self
        self.patches.enter_context(mock.patch.object(torch.nn.Module, "_apply", _apply))
        self.patches.enter_context(mock.patch.object(torch, "Generator", Generator))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()
        VirtualGPU.current = None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return self.dispatch(op, args, kwargs or {})

    def read(self):
        self.reads[_place()] += 1

    def copied(self, non_blocking: bool):
        if not non_blocking:
            self.copies[_place()] += 1

    def dispatch(self, op, args: tuple, kwargs: dict):
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        here = [tensor for tensor in given if isinstance(tensor, VirtualTensor)]
        into = kwargs.get("device")
        if not here and (into is None or into.type != "virtual"):
            return op(*args, **kwargs)

        kind = op.overloadpacket
        if here and kind not in COPIES:
            self._refuse_two_devices(op, given)
        made_here = bool(here) if into is None else into.type == "virtual"
        if kind is aten.copy_:
            made_here = isinstance(args[0], VirtualTensor)
        by_mask = kind in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if kind in WAITING or by_mask or (kind in COPIES and here and not made_here):
            self.read()
        if kind in COPIES and made_here:
            source, positional = (args[1], args[2:3]) if kind is aten.copy_ else (args[0], ())
            if not isinstance(source, VirtualTensor):
                self.copied(any(positional) or kwargs.get("non_blocking", False))

        held_args, held_kwargs = tree_unflatten(
            [leaf.held if isinstance(leaf, VirtualTensor) else leaf for leaf in leaves], spec
        )
        if into is not None and into.type == "virtual":
            held_kwargs["device"] = torch.device("cpu")
        made = op(*held_args, **held_kwargs)
        if not made_here:
            return made
        known = {id(tensor.held): tensor for tensor in here}  # of an operation in place
        return tree_map_only(torch.Tensor, lambda tensor: known.get(id(tensor), VirtualTensor(tensor)), made)

    def _refuse_two_devices(self, op, given: list[torch.Tensor]):
        for tensor in given:
            index = op.overloadpacket in INDEXING and tensor is not given[0]
            if not isinstance(tensor, VirtualTensor) and tensor.ndim > 0 and not index:
                raise RuntimeError(f"{op} on tensors of virtual:0 and {tensor.device}, at {_place()}")


class Generator(torch.Generator):
    """Random numbers come from the host."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu" if torch.device(device).type == "virtual" else device)
        made.of = torch.device(device)
        return made

    @property
    def device(self):
        return self.of


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return VirtualTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, into, non_blocking=False):
    if not isinstance(source, VirtualTensor):
        VirtualGPU.current.copied(non_blocking)
    into.held.copy_(source)
    return into


# What `torch.tensor` and indexing by lists call below all modes.
KERNELS = torch.library.Library("aten", "IMPL", "PrivateUse1")
KERNELS.impl("empty_strided", _empty_strided)
KERNELS.impl("_copy_from", _copy_from)


def _apply(module, fn, recurse=True):
    """What `Module.to` goes through. It sets `parameter.data`, which can change no tensor's class: replace the parameters."""
    for child in module.children():
        child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            moved = fn(parameter.detach())
            if moved.device != parameter.device or moved.dtype != parameter.dtype:
                module._parameters[name] = torch.nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _place() -> str:
    """Where the package is in the stack."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("dflash_hub"):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{frame.f_globals['__name__']}:{frame.f_lineno}"
