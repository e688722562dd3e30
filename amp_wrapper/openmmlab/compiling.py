"""``compile=True`` in a config: chooses what ``torch.compile`` compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import nn

from ..casting import roots
from ..errors import AmpConfigError, logger
from .wrappers import inner_model


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


def compile_model(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Let ``torch.compile`` compile the forward call of a model, with the loss that it returns, inside of DDP.

    The step of the optimizer, the hooks of the model and the preprocessing of data stay outside. So training and validation
    share what is compiled, and DDP's overlap with the backward pass stays.

    Args:
        model: Of mmengine, wrapped or not.
        options: Keywords of :func:`torch.compile`.

    Raises:
        AmpConfigError: A keyword or a backend that torch does not have.
    """
    inner = roots.unwrap(inner_model(model))
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
