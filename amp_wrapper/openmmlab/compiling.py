"""``compile=True`` in a config: chooses what ``torch.compile`` compiles, and says once what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import nn

from .. import compiler_internals
from ..casting import roots
from ..errors import AmpConfigError
from .log import logger
from .wrappers import inner_model

#: After so many iterations of a training the log says how many graphs there are. Most recompilations come before.
REPORT_AFTER = 10


@dataclasses.dataclass
class Compiled:
    """What was compiled for one runner.

    Attributes:
        model: What was compiled, with its wrappers.
        options: The keywords of :func:`torch.compile`.
        counts: What torch had counted before, of other models.
        iterations: Of the training, since then; None once the log has its line.
    """

    model: nn.Module
    options: Mapping[str, Any]
    counts: compiler_internals.CompileCounts
    iterations: int | None = 0

    def after_iteration(self) -> None:
        """An iteration of the training is over: after the tenth, the log says what was counted."""
        if self.iterations is not None:
            self.iterations += 1
            if self.iterations == REPORT_AFTER:
                self.report()

    def report(self) -> None:
        """Say how many graphs, breaks and recompilations there were; once."""
        if not self.iterations:
            return
        now = compiler_internals.compile_counts()
        # torch forgets its counts where somebody resets it
        graphs = max(now.graphs - self.counts.graphs, 0)
        again = max(now.recompilations - self.counts.recompilations, 0)
        known = self.counts.breaks
        reasons = {reason: max(count - known.get(reason, 0), 0) for reason, count in now.breaks.items()}
        breaks = sum(reasons.values())
        text = (
            f'torch.compile after {self.iterations} iterations: {_count(graphs, "graph")}, {_count(breaks, "break")}, '
        )
        text += f'{_count(again, "recompilation")}'
        first = [' '.join(reason.split())[:100] for reason, count in reasons.items() if count][:3]
        logger.info(text + (f'; the graph breaks at: {"; ".join(first)}' if first else ''))
        self.iterations = None


def _count(number: int, what: str) -> str:
    return f'{number} {what}' + ('' if number == 1 else 's')


def options_of(compile_: object) -> dict[str, Any] | None:
    """The keywords of :func:`torch.compile` that ``compile`` in a config stands for; None where it is off.

    Args:
        compile_: As mmengine takes it: None, a bool or a dict.

    Raises:
        AmpConfigError: Anything else.
    """
    if compile_ is None or compile_ is False:
        return None
    if compile_ is True:
        return {}
    if not isinstance(compile_, Mapping):
        raise AmpConfigError(
            [
                f'compile={compile_!r} must be a bool, or a dict of keywords of torch.compile, such as dict(mode="default").'
            ]
        )
    return dict(compile_)


def compile_model(model: nn.Module, options: Mapping[str, Any]) -> Compiled:
    """Let ``torch.compile`` compile the forward call of a model, with the loss that it returns, inside of DDP.

    The step of the optimizer, the hooks of the model and the preprocessing of data stay outside. So training and validation
    share what is compiled, and DDP's overlap with the backward pass stays.

    Args:
        model: Of mmengine, wrapped or not.
        options: Keywords of :func:`torch.compile`.

    Raises:
        AmpConfigError: A keyword or a backend that torch does not have, or one that needs a compiler which is not there.
    """
    before = compiler_internals.compile_counts()
    inner = roots.unwrap(inner_model(model))
    problem = compiler_internals.compile_problem(options, next(iter(inner.parameters()), None))
    if problem is not None:
        raise AmpConfigError([f'compile={dict(options)!r}: {problem}'])
    targets = _targets(inner)
    try:
        for module in targets.values():
            module.compile(**options)
    except (TypeError, RuntimeError, AssertionError) as error:
        raise AmpConfigError([f'compile={dict(options)!r} is not what torch.compile takes: {error}']) from error
    names = [f'{name or "the model"} ({type(module).__name__})' for name, module in targets.items()]
    words = ', '.join(f'{key}={value!r}' for key, value in options.items()) or 'default options'
    logger.info(
        f'torch.compile compiles the forward calls of {", ".join(names)}, losses included ({words}). The first iterations are '
        f'slow.'
    )
    return Compiled(model, dict(options), before)


def _targets(model: nn.Module) -> dict[str, nn.Module]:
    """The model; and its parts, where a ``train_step`` of its own may call them directly, as in a GAN."""
    found = {'': model}
    if getattr(type(model), 'train_step', None) is not BaseModel.train_step:
        for name, child in model.named_children():
            part = roots.unwrap(child)
            has_weights = any(True for _ in part.parameters())
            if has_weights and not isinstance(part, (BaseDataPreprocessor, nn.ModuleList, nn.ModuleDict)):
                found[name] = part
    return found


def decompile(model: nn.Module, method: str) -> None:
    """Take back that mmengine has compiled a method of a model, which it has put in the place of the method."""
    vars(model).pop(method, None)
