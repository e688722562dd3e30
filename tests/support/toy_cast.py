"""Small models, and calls that cast them without an engine, for tests of the casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_wrapper.casting.cast_handle import CastHandle
from amp_wrapper.casting.fp32_values import Master, pair
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.policy import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CAST_LEVELS = {'O2': F16, 'O3': F16, 'O5': BF16}


def cast(model: nn.Module, level: str = 'O2', leave: Any = (), average: Any = (), **overrides: Any) -> CastHandle:
    return CastPlan([('', model)], resolve(level, **overrides), leave, average).apply()


def cast_with_masters(model: nn.Module, level: str = 'O2', **overrides: Any) -> tuple[CastHandle, dict[str, Tensor]]:
    """Cast and pair every cast parameter with its unrounded values."""
    plan = CastPlan([('', model)], resolve(level, **overrides))
    masters = {name: parameter.detach().clone() for name, parameter in plan.parameters.items()}
    handle = plan.apply()
    for name, parameter in plan.parameters.items():
        pair(parameter, Master(parameter, masters[name], name))
    return handle, masters


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


def hook_count(model: nn.Module) -> int:
    return sum(
        len(getattr(module, table))
        for module in model.modules()
        for table in (
            '_forward_pre_hooks',
            '_forward_hooks',
            '_state_dict_hooks',
            '_load_state_dict_pre_hooks',
            '_load_state_dict_post_hooks',
            '_forward_pre_hooks_with_kwargs',
            '_forward_hooks_always_called',
        )
    )


class Net(nn.Module):
    """Convolution, BatchNorm, head; makes an FP32 tensor inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer('mean', torch.tensor([0.1, 0.2, 0.3]))

    def features(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu().mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.zeros(len(x), 4, device=x.device)
        return self.head(self.features(x) + noise) + self.mean


def net(device: torch.device) -> Net:
    torch.manual_seed(1)
    return Net().to(device)


def images(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, 2 * 2 * 5 * 5, device=device).reshape(2, 2, 5, 5)


class WithLoss(nn.Module):
    def __init__(self, loss: nn.Module | Callable[..., Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        assert self.fc(x[:1, :2].expand(1, 2)).dtype is F16
        result = self.loss(x)
        assert result.dtype is F32
        return result
