"""Finds the modules whose buffers a skipped step of an optimizer restores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def owned_modules(
    roots: Iterable[tuple[str, nn.Module]],
    mine: Iterable[Tensor],
    theirs: Iterable[Tensor],
    leave: tuple[type, ...],
) -> list[tuple[str, nn.Module]]:
    """The modules whose buffers belong to an optimizer, with their qualified names, in order.

    A module belongs to the optimizers that step one of its own parameters; without any, to those that step one of the modules
    below it, or else to those of the module above.

    Args:
        roots: (qualified name, module): the models.
        mine: What the optimizer steps.
        theirs: What other optimizers step.
        leave: Module classes to leave out, with everything in them.
    """
    own, others = set(map(id, mine)), set(map(id, theirs))
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, above: bool) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen or isinstance(module, leave):
            return
        seen.add(id(module))
        stepped = own
        if others:
            stepped = (own | others).intersection(map(id, module.parameters(recurse=False)))
            stepped = stepped or (own | others).intersection(map(id, module.parameters()))
        belongs = not own.isdisjoint(stepped) if stepped else above
        if belongs:
            yield name, module
        for key, child in module.named_children():
            yield from visit(child, f'{name}.{key}' if name else key, belongs)

    return [found for name, root in roots for found in visit(root, name, True)]
