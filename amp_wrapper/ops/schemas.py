"""The schemas of the ops, registered with torch's dispatcher, with their fake kernels and the reference behind them.

``torch.ops.amp_wrapper.<name>`` exists whether or not anything was compiled. The compiled library registers kernels for the
CPU and for CUDA; every other device, and a package without the library, is served by the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import optimizer_step as reference_step
from . import reference

NAMESPACE = 'amp_wrapper'

#: Name to arguments and results. ``(a!)`` marks what is written.
SCHEMAS = {
    'multi_tensor_scale': (
        '(Tensor[] sources, Tensor(a!)[] targets, Tensor? scale=None, Tensor(b!)? found_inf=None) -> ()'
    ),
    'multi_tensor_axpby': (
        '(Tensor[] xs, Tensor[] ys, Tensor(a!)[] targets, Tensor? a=None, Tensor? b=None, '
        'Tensor(b!)? found_inf=None, bool check_x=True, bool check_y=True) -> ()'
    ),
    'multi_tensor_copy': '(Tensor[] sources, Tensor(a!)[] targets) -> ()',
    'multi_tensor_isnonfinite': '(Tensor[] tensors, Tensor(a!) found_inf) -> ()',
    'multi_tensor_l2norm': (
        '(Tensor[] tensors, Tensor? inverse_scale=None, Tensor(a!)? found_inf=None, bool per_tensor=False) '
        '-> (Tensor, Tensor)'
    ),
    'multi_tensor_maxnorm': (
        '(Tensor[] tensors, Tensor? inverse_scale=None, Tensor(a!)? found_inf=None, bool per_tensor=False) '
        '-> (Tensor, Tensor)'
    ),
    'multi_tensor_scale_l2norm': (
        '(Tensor[] sources, Tensor(a!)[] targets, Tensor? scale=None, Tensor(b!)? found_inf=None) -> Tensor'
    ),
    'multi_tensor_refresh': '(Tensor[] weights, Tensor(a!)[] masters) -> Tensor',
    'update_scale': (
        '(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_tracker, Tensor found_inf, '
        'float growth_factor, float backoff_factor, int growth_interval, int hysteresis, '
        'float? min_scale=None, float? max_scale=None) -> ()'
    ),
    'step_prologue': (
        '(Tensor(a!) decision, Tensor(b!) rows, Tensor(c!)[] steps, Tensor hyper, Tensor groups, int kind, '
        'Tensor[] rates, int[] rated, Tensor? found_inf=None, Tensor? learned=None, Tensor? norm=None, '
        'Tensor(d!)? scale=None, Tensor(e!)? growth_tracker=None, Tensor(f!)? hysteresis_tracker=None, '
        'Tensor(g!)? counts=None, float[] rule=[], float? max_norm=None, float? clip_value=None) -> ()'
    ),
    'fused_adam': (
        '(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, '
        'Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] partners, Tensor rows, Tensor decision) -> ()'
    ),
    'fused_sgd': (
        '(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor(c!)[] partners, Tensor rows, '
        'Tensor decision) -> ()'
    ),
}

#: The functions of the ops, by name.
REFERENCES = {name: getattr(reference, name, None) or getattr(reference_step, name) for name in SCHEMAS}

_library = torch.library.Library(NAMESPACE, 'DEF')  # type: ignore[no-untyped-call]
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, REFERENCES[_name], 'CompositeExplicitAutograd')  # type: ignore[no-untyped-call]
    # a lazy negation is looked at by the kernels: torch's fallback expects written arguments to be returned
    _library.impl(_name, torch.library.fallthrough_kernel, 'Negative')  # type: ignore[no-untyped-call]
    # not differentiable: results want no gradient, whatever the inputs do
    _library.impl(_name, torch.library.fallthrough_kernel, 'Autograd')  # type: ignore[no-untyped-call]


def _refuse_meta_beside_real(*arguments: object) -> None:
    """The dispatcher sends lists of both here, where nothing is computed: the real ones would be left as they are."""
    tensors = [t for value in arguments for t in (value if isinstance(value, (list, tuple)) else [value])]
    if len({tensor.is_meta for tensor in tensors if isinstance(tensor, Tensor)}) > 1:
        raise NotImplementedError('One call takes meta tensors or real ones, not both.')


def _writes_only(*args: object, **kwargs: object) -> None:
    """What is written keeps its shape and type."""
    _refuse_meta_beside_real(*args, *kwargs.values())


for _name in (
    'multi_tensor_scale',
    'multi_tensor_axpby',
    'multi_tensor_copy',
    'multi_tensor_isnonfinite',
    'update_scale',
    'step_prologue',
    'fused_adam',
    'fused_sgd',
):
    torch.library.register_fake(f'{NAMESPACE}::{_name}', _writes_only, lib=_library)


def _fake_norm(
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    _refuse_meta_beside_real(tensors, inverse_scale, found_inf)
    device = reference.device_of(tensors, found_inf)
    count = len(tensors) if per_tensor else 0
    return torch.empty((), dtype=torch.float32, device=device), torch.empty(count, dtype=torch.float32, device=device)


for _name in ('multi_tensor_l2norm', 'multi_tensor_maxnorm'):
    torch.library.register_fake(f'{NAMESPACE}::{_name}', _fake_norm, lib=_library)


@torch.library.register_fake(f'{NAMESPACE}::multi_tensor_scale_l2norm', lib=_library)  # type: ignore[untyped-decorator]
def _fake_scale_norm(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    _refuse_meta_beside_real(sources, targets, scale, found_inf)
    return torch.empty((), dtype=torch.float32, device=reference.device_of(sources, found_inf))


@torch.library.register_fake(f'{NAMESPACE}::multi_tensor_refresh', lib=_library)  # type: ignore[untyped-decorator]
def _fake_refresh(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> Tensor:
    _refuse_meta_beside_real(weights, masters)
    return torch.empty(len(weights), dtype=torch.bool, device=reference.device_of(weights))
