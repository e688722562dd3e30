"""Copies of models that run at any level, and leave everything as it was."""

from __future__ import annotations

import functools
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from bits import differences
from torch import Tensor, nn
from toy_overflow import Deep, batches, square

from amp_wrapper import AmpAttachError, AmpOptimWrapper, amp
from amp_wrapper.diagnostics.sandbox import CannotCopyError, fp32_copy, sandbox
from amp_wrapper.policy import LEVELS, resolve


def attached(level: str) -> tuple[nn.Module, AmpOptimWrapper]:
    torch.manual_seed(0)
    model = Deep()
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    wrapper.attach(model)
    for x in batches(2):
        with wrapper.optim_context(model):
            loss = square(model(x))
        wrapper.update_params(loss)
    return model, wrapper


def everything(model: nn.Module, wrapper: AmpOptimWrapper) -> list[Any]:
    hooks = [(list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.modules()]
    gradients = [p.grad for p in model.parameters()]
    return [model.state_dict(), wrapper.state_dict(), gradients, hooks, [module.training for module in model.modules()]]


def random_numbers() -> list[Any]:
    return [random.random(), np.random.rand(3), torch.rand(3)]


@pytest.mark.parametrize('inside', LEVELS)
@pytest.mark.parametrize('level', LEVELS)
def test_any_level_inside_of_any_level(level: str, inside: str) -> None:
    model, wrapper = attached(level)
    before = everything(model, wrapper)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = random_numbers()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with sandbox(model, resolve(inside)) as box:
        x = torch.randn(6, 4)
        random_numbers()
        with box.forward():
            output = box.model(nn.functional.dropout(x))
        square(output).backward()
        assert all(p.grad is not None for p in box.model.parameters())
        half = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}.get(inside, torch.float32)
        assert box.model.stem.weight.dtype is half
        with torch.no_grad():
            box.model.norm.running_mean.fill_(7.0)
    assert differences(random_numbers(), wanted) == []
    assert differences(everything(model, wrapper), before) == []


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_copies_have_the_values_of_masters(level: str) -> None:
    model, wrapper = attached(level)
    copied = fp32_copy(model)
    masters = dict(zip(dict(model.named_parameters()), wrapper.master_params()))
    for name, parameter in copied.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, masters[name].detach())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in copied.modules())


def test_an_optimizer_for_the_copy() -> None:
    model, wrapper = attached('O2')
    before = everything(model, wrapper)
    with sandbox(model, resolve('O5'), lambda copied: torch.optim.SGD(copied.parameters(), lr=0.1)) as box:
        weight = box.model.stem.weight.clone()
        with box.forward():
            loss = square(box.model(batches(1)[0]))
        box.engine.backward(loss)
        box.engine.step()
        assert not torch.equal(weight, box.model.stem.weight)
    assert differences(everything(model, wrapper), before) == []


def test_contexts_of_the_caller_do_not_count() -> None:
    model = Deep()
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        with sandbox(model, resolve('O0')) as box:
            output = box.model(batches(1)[0])
        assert output.dtype is torch.float32
        assert output.requires_grad
        assert not torch.is_grad_enabled()


def test_a_model_that_keeps_a_loss() -> None:
    class Keeps(Deep):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            self.last = square(output)
            self.seen = [self.last]
            return output

    model = Keeps()
    model(batches(1)[0])
    copied = fp32_copy(model)
    assert torch.equal(copied.last, model.last)
    assert not copied.last.requires_grad
    assert model.last.requires_grad


def test_a_model_that_cannot_be_copied() -> None:
    model = Deep()
    model.lock = threading.Lock()
    with pytest.raises(CannotCopyError, match=r'copy\.deepcopy\(model\) failed \(TypeError'):
        fp32_copy(model)


def test_methods_that_were_replaced_on_one_module() -> None:
    """mmengine's activation checkpointing does so; Python copies no function."""
    from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing

    model = Deep()
    turn_on_activation_checkpointing(model, ['blocks.1'])
    scale = [1.0]

    def doubled(x: Tensor, original: Any = model.heads[0].forward) -> Tensor:
        return original(x) * 2 * scale[0] + model.heads[0].bias

    model.heads[0].forward = functools.partial(doubled, original=model.heads[0].forward)
    x = batches(1)[0]
    wanted = model(x).detach()
    model.zero_grad()
    with sandbox(model, resolve('O0')) as box:
        assert torch.equal(box.model(x).detach(), wanted)
        square(box.model(x)).backward()
        assert all(p.grad is not None for p in box.model.blocks[1].parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_wrapper_of_compile() -> None:
    model = Deep()
    copied = fp32_copy(torch.compile(model))
    assert type(copied) is Deep


def test_random_states_come_back_after_an_error() -> None:
    model = Deep()
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)

    def fail() -> None:
        with sandbox(model, resolve('O2')):
            torch.rand(5)
            raise ValueError('inside')

    with pytest.raises(ValueError, match='inside'):
        fail()
    assert torch.equal(torch.rand(2), wanted)


def test_a_level_that_cannot_be_had() -> None:
    model = Deep()
    with torch.no_grad():
        model.stem.weight.fill_(1e6)
    with pytest.raises(AmpAttachError, match='range'), sandbox(model, resolve('O2')):
        pass


def test_scripts_too() -> None:
    model = Deep()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level='O2', verbosity=0)
    with sandbox(model, resolve('O1')) as box:
        assert box.model.stem.weight.dtype is torch.float32
    with amp.scale_loss(square(model(batches(1)[0])), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
