"""``from amp_wrapper import amp``: the functional interface of ``apex.amp``, over the engine of the mmengine wrapper.

```python
from amp_wrapper import amp

model, optimizer = amp.initialize(model, optimizer, opt_level='O2')
for inputs, target in loader:
    optimizer.zero_grad()
    loss = criterion(model(inputs), target)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..casting.sharding import Sharding, shard
from ..compiler_internals import untraced
from ..diagnostics.precision_report import report as report
from ..diagnostics.suggest_level import suggest_level as suggest_level
from ..errors import AmpConfigError, AmpUsageError, short
from ..policy import OPTIONS, OptLevel
from ..policy.levels import DEFAULT_MAX_LOSS_SCALE
from ..policy.nested import parameters_of
from ..policy.options import Fp32Names
from ..shards import rank
from . import arguments as amp_arguments
from .arguments import InitializeOptions
from .functions import bfloat16_function as bfloat16_function
from .functions import disable_casts as disable_casts
from .functions import float_function as float_function
from .functions import half_function as half_function
from .functions import promote_function as promote_function
from .functions import register_bfloat16_function as register_bfloat16_function
from .functions import register_float_function as register_float_function
from .functions import register_half_function as register_half_function
from .functions import register_promote_function as register_promote_function
from .legacy import init as init
from .monitoring import last_step_skipped as last_step_skipped
from .monitoring import loss_scale as loss_scale
from .monitoring import monitor as monitor
from .monitoring import skipped_steps as skipped_steps
from .registry import listed, registry
from .scales import load_state_dict as load_state_dict
from .scales import state_dict as state_dict
from .scaling import scaled
from .session import Session

# what is handed over comes back, of the same type
_Models = TypeVar('_Models', bound=nn.Module | Sequence[nn.Module])
_Optimizers = TypeVar('_Optimizers', bound=Optimizer | Sequence[Optimizer])


@overload
def initialize(models: _Models, optimizers: None = None, *args: Any, **given: Unpack[InitializeOptions]) -> _Models: ...
@overload
def initialize(
    models: _Models, optimizers: _Optimizers, *args: Any, **given: Unpack[InitializeOptions]
) -> tuple[_Models, _Optimizers]: ...
def initialize(  # type: ignore[misc]
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: OptLevel = 'O1',
    cast_model_type: str | torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | Mapping[str, Any] | None = None,
    cast_model_outputs: str | torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = DEFAULT_MAX_LOSS_SCALE,
    *,
    keep_fp32: str | type | Sequence[str | type] | None = None,
    fp32_ops: Fp32Names | None = None,
    keep_inputs: str | Sequence[str] | None = None,
    from_16bit: bool = False,
    restore_buffers_on_skip: bool = True,
    mesh: DeviceMesh | None = None,
    sharding: Mapping[str, Any] | None = None,
) -> Any:
    """Cast models, make FP32 masters for their optimizers, and set up the loss scales. In place.

    Call it once, after the models are on their device and hold their first (or loaded) FP32 weights, after the optimizers were
    built, and before ``DistributedDataParallel`` wraps a model. It may be called again for other models and optimizers: each
    call has loss scales of its own.

    Args:
        models: One or a list or tuple of them; all are cast as wholes, whoever steps their parameters. An empty list is for
            optimizers of models that were initialised before: their level holds, and their masters are kept.
        optimizers: One or several that will be stepped, or None for inference. ``step`` and ``zero_grad`` of these objects lead
            through this package from now on; class, pickled form and schedulers stay as they are.
        enabled: False makes this and all that follows a no-op; the rest is still checked. With a ``mesh``, the models are
            sharded all the same, in FP32.
        opt_level: 'O0' to 'O5'.
        cast_model_type: Type of the model weights, or False for no cast.
        patch_torch_functions: Whether operations are cast one by one (O1 and O4).
        keep_batchnorm_fp32: Whether BatchNorm stays FP32; True, False, 'True' or 'False'.
        master_weights: Whether the optimizer steps FP32 counterparts of 16-bit weights.
        loss_scale: 'dynamic', a positive number (also as a string), a dict in ``GradScaler``'s words, or None for the level's
            own.
        cast_model_outputs: Type of the models' floating outputs; FP32 where None.
        num_losses: Losses with a scale of their own, chosen by ``loss_id``.
        verbosity: 0 silent, 1 warnings, the options and skipped steps, 2 a line for each cast too.
        min_loss_scale: Floor of a dynamic scale.
        max_loss_scale: Ceiling of a dynamic scale, or None; default 2**24.
        keep_fp32: Module classes, class names or glob patterns over qualified names that stay FP32. With several models,
            the names are those within each.
        fp32_ops: Functions, methods, autograd Functions and module classes that run in FP32 beside those of the registry
            (:data:`amp_wrapper.policy.fp32_registry.FP32_OPS`): dotted names, objects, or dicts such as
            ``dict(name='torch.Tensor.sum', output='float32')``, whose results stay FP32.
        keep_inputs: Names of arguments of ``forward``, of a model or of a module below it, whose floating tensors stay as they
            are: time steps, coordinates, positions. At the levels that cast the model.
        from_16bit: Whether trainable weights that are 16-bit already are taken: their FP32 values begin with the rounded ones.
            Frozen 16-bit weights are always taken.
        restore_buffers_on_skip: Whether a skipped step gives buffers (BatchNorm's statistics, counters) back that its forward
            passes have changed. apex left them as they were, NaN included.
        mesh: Shards the models over these ranks, by FSDP2, and puts the shards into the optimizers, which must not have
            stepped. Leave it out for models that were sharded before; they are checked against the level.
        sharding: How: a dict of ``blocks``, ``reduce_dtype``, ``reshard_after_forward`` and ``offload``, as for
            :func:`amp_wrapper.fully_shard`.

    Returns:
        ``models``, or ``(models, optimizers)`` where optimizers were given: the same objects, in lists or tuples as they came.

    Raises:
        AmpConfigError: Every conflict of the configuration in one message.
        AmpAttachError: A model that is wrapped or cast already, 16-bit without ``from_16bit``, or beyond the range of float16;
            an optimizer that cannot be wrapped, was initialised already, or steps nothing of the models. Nothing has been
            changed.
        TypeError: Something else than models and optimizers.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name in OPTIONS}
    policy = amp_arguments.policy_of(opt_level, given)
    model_list = listed(models, nn.Module, 'models')
    optimizer_list = [] if optimizers is None else listed(optimizers, Optimizer, 'optimizers')
    registry.check_new(optimizer_list)
    if mesh is None and sharding is not None:
        raise AmpConfigError([f'sharding={sharding!r} without a mesh: write mesh=..., or leave it out.'])
    chosen = None if mesh is None else Sharding.of(mesh, sharding, policy)
    if policy.enabled:
        amp_arguments.check_models(model_list)
        if not model_list:
            policy = amp_arguments.of_known_models(policy, optimizer_list, given)
        # the first rank prints for all
        policy = dataclasses.replace(policy, verbosity=0 if rank() else policy.verbosity)
        session = Session(policy, model_list, optimizer_list, sharding=chosen)
        if policy.verbosity:
            amp_arguments.print_options(policy, given, session)
    else:
        if chosen is not None:
            shard(model_list, policy, chosen, optimizer_list)
        registry.add(optimizer_list, None)
    return models if optimizers is None else (models, optimizers)


@untraced
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Give the loss times its scale for ``backward()``; on leaving, gradients are unscaled and checked. No host read.

    ```python
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    ```

    Each block adds to what is there, in FP32 where the optimizer has masters. Where a gradient of any of the optimizers is
    non-finite, the next ``step()`` of all of them is left out, and the scale of the loss falls with it.

    Args:
        loss: Floating tensor of any shape, mostly a scalar.
        optimizers: Every optimizer that will step with gradients of this backward pass. Gradients that reach parameters of
            others of the same ``amp.initialize`` are unscaled too.
        loss_id: Which of the ``num_losses`` scales, from 0. That of the first optimizer's ``amp.initialize`` holds.
        model: Not used, as in apex.
        delay_unscale: Accepted, and without effect: gradients are always unscaled on leaving.
        delay_overflow_check: Accepted, and without effect: whether a step is skipped is decided when it is taken, from all
            backward passes since the last one.

    Returns:
        A block that gives a float32 tensor of the loss's shape (float64 for a float64 loss); ``loss`` itself where mixed
        precision is not enabled.

    Raises:
        AmpConfigError: Something else than optimizers.
        AmpUsageError: No such loss; an optimizer that was not initialised; a block inside another one; a backward pass of the
            scaled loss after its block. After an exception inside the block, what has come by then is there, unscaled.
    """
    return scaled(loss, registry.engines_of(optimizers), loss_id)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """What an optimizer steps: FP32 masters, and parameters that are their own; of any optimizer, initialised or not.

    Their ``.grad`` is unscaled after :func:`scale_loss`: clip these.

    Args:
        optimizer: A torch optimizer.

    Yields:
        Parameters, in the order of the groups.

    Raises:
        AmpUsageError: No optimizer.
    """
    if not hasattr(optimizer, 'param_groups'):
        raise AmpUsageError(f'optimizer={short(optimizer)} must be a torch optimizer, not {type(optimizer).__name__}.')
    session = registry.session_of(optimizer)
    yield from parameters_of(optimizer) if session is None else session.engine(optimizer).master_params()


def weights_changed(optimizer: Optimizer, tensors: Iterable[Tensor] | None = None) -> list[str]:
    """Say that model weights were edited through ``.data``: their FP32 masters take the new values. Syncs.

    Edits under ``torch.no_grad()`` are noticed by themselves; those through ``.data`` leave no trace, so call this right after
    them. apex had no such function.

    Args:
        optimizer: Steps the weights.
        tensors: The edited parameters of the model; all by default.

    Returns:
        The names of the weights that differed from their masters; nothing without masters.

    Raises:
        AmpUsageError: An optimizer that was not initialised; a master among ``tensors``, or none given and a master was written
            to as well.
    """
    return [name for engine in registry.engines_of(optimizer) for name in engine.params.changed('weight', tensors)]


def masters_changed(optimizer: Optimizer, tensors: Iterable[Tensor] | None = None) -> None:
    """Say that FP32 masters were edited through ``.data``: the model's weights take the new values. No host read.

    Masters are what ``optimizer.param_groups`` and :func:`master_params` hold. Edits under ``torch.no_grad()`` are noticed by
    themselves; those through ``.data`` leave no trace, so call this right after them. apex had no such function.

    Args:
        optimizer: Steps the masters.
        tensors: The edited masters; all by default.

    Raises:
        AmpUsageError: An optimizer that was not initialised; a weight among ``tensors``, or none given and a weight was written
            to as well.
    """
    for engine in registry.engines_of(optimizer):
        engine.params.changed('master', tensors)
