"""Warns of layers that join a model after it was cast: their weights stay FP32."""

from __future__ import annotations

import functools
import logging

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from . import cast_module
from .modules import is_batchnorm, is_loss

logger = logging.getLogger('amp_wrapper')


@functools.cache
def watch() -> None:
    """Be told of modules that join others; once in a process."""
    register_module_module_registration_hook(_see)


def _see(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    """Called by torch before a module becomes a child of another."""
    if torch.compiler.is_dynamo_compiling():
        # a wrapper that is made in a graph, and thrown away
        return
    rule = cast_module.rule_of(parent)
    if rule is None or not (rule.casts and rule.speaks) or new is None or cast_module.is_cast(new):
        return
    trains = any(weight.dtype is torch.float32 and weight.requires_grad for weight in new.parameters())
    if trains and not is_loss(new) and not is_batchnorm(new):
        logger.warning(
            f'amp: {name} ({type(new).__name__}) joins a model at {rule.level} that was initialised before: its weights '
            f'stay FP32. To cast it as the rest, initialise it by itself before it joins: '
            f'layer = amp.initialize(layer, opt_level={rule.level!r}).'
        )
