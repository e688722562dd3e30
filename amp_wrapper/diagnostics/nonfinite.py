"""Finds the first module whose output has a NaN or an infinity, on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .op_tensors import numbers


class NonfiniteWatch:
    """Watches every module of a model for outputs with infinities or NaN.

    Each forward adds one small reduction per module on the device; the device is read only by :meth:`first`.

    Args:
        model: Any module, cast or not. :meth:`remove` ends the watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._flags: list[tuple[str, Tensor]] = []
        # comes before the outputs of any child: bad data is not a module's fault
        self._handles = [model.register_forward_pre_hook(self._see_input, with_kwargs=True)]
        for name, module in model.named_modules():
            label = f'{name or "the model"} ({type(module).__name__})'
            self._handles.append(module.register_forward_hook(partial(self._see_output, label)))

    def _see_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._see_output("the model's input", module, (), (args, kwargs))

    def _see_output(self, label: str, module: nn.Module, args: Any, output: Any) -> None:
        self._flags += [(label, tensor.detach().isfinite().all()) for tensor in numbers(output)]

    def first(self) -> str | None:
        """The earliest place since the last call, such as ``'head.fc (Linear)'``; None where all was finite. Syncs.

        Modules are reported in the order in which they finish, so the innermost one comes first.
        """
        flags, self._flags = self._flags, []
        finite = torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist() if flags else []
        return next((label for (label, _), good in zip(flags, finite) if not good), None)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def nonfinite_watch(model: nn.Module) -> Iterator[NonfiniteWatch]:
    """A :class:`NonfiniteWatch` that ends with the block, by an exception too.

    Args:
        model: Any module.

    Examples:
        >>> import torch
        >>> from amp_wrapper import nonfinite_watch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with nonfinite_watch(model) as watch:
        ...     _ = model(torch.tensor([[1.0, float('nan')]]))
        ...     print(watch.first())
        the model's input
    """
    watch = NonfiniteWatch(model)
    try:
        yield watch
    finally:
        watch.remove()
