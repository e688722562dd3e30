"""``AmpOptimWrapper``: the opt levels as an optimizer wrapper of mmengine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from mmengine.optim import AmpOptimWrapper as TorchAmpOptimWrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS as ROOT_OPTIM_WRAPPERS
from torch import Tensor, nn

from .. import ops
from ..checkpoint import amp_part
from ..compiler_internals import eager_block
from ..engine import Engine, backward, before_forward, detach, forward_context, take_step
from ..engine import attach as attach_engine
from ..engine import state as engine_state
from ..engine.flags import COLUMNS, StepResult
from ..engine.loss_scale import LossScaler
from ..errors import AmpAttachError, logger
from ..policy import OptLevel, Policy
from ..policy.levels import DEFAULT_MAX_LOSS_SCALE
from ..policy.options import Fp32Names
from ..registry import OPTIM_WRAPPERS
from . import arguments, attaching, patches
from .device_log import DeviceLog
from .log import follow_runners

patches.install()


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """Mixed-precision training at the opt levels O0 to O5, through mmengine.

    With the type alone it is O1 with a dynamic loss scale, as mmengine's own ``AmpOptimWrapper``, whose arguments it
    all accepts; those of ``ApexOptimWrapper`` too. The model is cast when ``initialize_count_status`` or the first
    ``optim_context`` is called, after the weights were initialised or loaded. Attributes of a step (``train/grad_norm``,
    ``train/amp_scale``, ``train/amp_skipped``) reach mmengine's log without a device wait of their own.

    Args:
        loss_scale: 'dynamic', a positive number (also as a string), a dict in ``GradScaler``'s words, or None for the
            level's own.
        dtype: 'float16' or 'bfloat16' (with O1, O2, O3); 'float32' and 'float64' mean no autocast. Also torch dtypes.
        use_fsdp: Of mmengine's FSDPStrategy; True is refused: ``MMFullyShard`` shards.
        opt_level: 'O0' FP32, 'O1' autocast to float16, 'O2' float16 model with FP32 masters, 'O3' pure 16-bit,
            'O4' and 'O5' the bfloat16 counterparts of O1 and O2.
        enabled: False makes this a plain ``OptimWrapper``, its checkpoints included.
        cast_model_type: Type of the model weights, or False for no cast.
        patch_torch_functions: Whether autocast runs (O1 and O4).
        keep_batchnorm_fp32: Whether BatchNorm stays FP32; True, False, 'True' or 'False'.
        master_weights: Whether the optimizer steps FP32 counterparts of 16-bit weights. ``'split'``: each is kept as the 16-bit
            weight and a 16-bit remainder, which only this package's fused optimizers can step.
        cast_model_outputs: Type of the model's floating outputs; FP32 at the levels that cast.
        num_losses: Losses with a scale of their own, chosen by ``loss_id``.
        verbosity: 0 silent, 1 warnings and skipped steps, 2 a line for each cast too.
        min_loss_scale: Floor of a dynamic scale.
        max_loss_scale: Ceiling of a dynamic scale, or None; default 2**24.
        keep_fp32: Module classes, class names or glob patterns over qualified names that stay FP32.
        fp32_ops: Functions, methods, autograd Functions and module classes that run in FP32 beside those of the
            registry (:data:`amp_wrapper.policy.fp32_registry.FP32_OPS`): dotted names, objects, or dicts such as
            ``dict(name='torch.Tensor.sum', output='float32')``, whose results stay FP32.
        keep_inputs: Names of arguments of ``forward`` whose floating tensors stay as they are: time steps, coordinates.
        skip_nonfinite: Whether a static scale checks gradients too; None for "at every level but O0".
        max_consecutive_skips: Skipped steps in a row that end the training with an error; None for never.
        accumulate_in_fp32: Whether accumulated gradients of 16-bit weights are summed in FP32, for 2 more bytes per weight.
        restore_buffers_on_skip: Whether a skipped step undoes what its forward passes did to buffers.
        from_16bit: Whether trainable weights that are 16-bit already are taken: FP32 values begin as these. Frozen ones are.
        **kwargs: ``optimizer``, ``accumulative_counts`` and ``clip_grad`` of mmengine's ``OptimWrapper``.

    Raises:
        AmpConfigError: Every conflict of the configuration in one message, before any work.
        AmpAttachError: An optimizer that cannot be wrapped.

    Examples:
        >>> import torch
        >>> from amp_wrapper import AmpOptimWrapper
        >>> model = torch.nn.Linear(4, 2)
        >>> wrapper = AmpOptimWrapper(opt_level='O5', optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with wrapper.optim_context(model):
        ...     loss = model(torch.ones(1, 4)).sum()
        >>> wrapper.update_params(loss)
        >>> model.weight.dtype
        torch.bfloat16
    """

    def __init__(
        self,
        loss_scale: float | str | Mapping[str, Any] | None = None,
        dtype: str | torch.dtype | None = None,
        use_fsdp: bool = False,
        opt_level: OptLevel = 'O1',
        enabled: bool = True,
        cast_model_type: str | torch.dtype | bool | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | Literal['split'] | None = None,
        cast_model_outputs: str | torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = DEFAULT_MAX_LOSS_SCALE,
        keep_fp32: str | type | list[str | type] | tuple[str | type, ...] | None = None,
        fp32_ops: Fp32Names | None = None,
        skip_nonfinite: bool | None = None,
        max_consecutive_skips: int | None = 50,
        accumulate_in_fp32: bool = False,
        restore_buffers_on_skip: bool = True,
        from_16bit: bool = False,
        keep_inputs: str | list[str] | tuple[str, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        options = {name: value for name, value in locals().items() if name in _OWN_ARGUMENTS and name != 'use_fsdp'}
        resolved, self._clip = arguments.resolve(options, use_fsdp, kwargs, _OWN_ARGUMENTS)
        self._engine = Engine(resolved, kwargs['optimizer'])
        if kwargs.get('clip_grad') is not None:
            # mmengine pops from the dict it is given
            kwargs['clip_grad'] = dict(kwargs['clip_grad'])
        super().__init__(**kwargs)
        #: What stands in front of its numbers in the log: 'train/', and its name in an ``OptimWrapperDict``.
        self.log_prefix = 'train/'
        #: Takes numbers of the device to the log without a wait.
        self.device_log = DeviceLog(self.message_hub, self._engine)
        # of the step since the last backward pass
        self._last: StepResult | None = None
        follow_runners()
        self._say(f'{type(self).__name__} of amp_wrapper: {resolved.describe()}; ops: {ops.backend()}')

    @property
    def policy(self) -> Policy:
        """The resolved configuration."""
        return self._engine.policy

    @property
    def opt_level(self) -> OptLevel:
        """'O0' to 'O5', after ``dtype`` was applied."""
        return self._engine.policy.opt_level

    @property
    def loss_scaler(self) -> LossScaler:
        """The scaler of the first loss; ``get_scale()`` reads it."""
        return self._engine.scales.scalers[0]

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """One scaler per loss."""
        return list(self._engine.scales.scalers)

    @property
    def in_window(self) -> bool:
        """Whether accumulated gradients of this wrapper's own losses wait for their step."""
        return self._engine.is_accumulating and any(self._engine.flags.used)

    def master_params(self) -> Iterator[Tensor]:
        """Every tensor that the optimizer steps: masters, FP32 parameters, 16-bit weights with ``master_weights='split'``."""
        yield from self._engine.master_params()

    def join(self, others: Iterable[Any], name: str = '') -> None:
        """Say which other wrappers train parts of the same model. mmengine's ``OptimWrapperDict`` needs no call.

        Args:
            others: Of this class; losses of this one may reach their parameters.
            name: Stands in front of its lines and numbers in the log.

        Raises:
            AmpAttachError: A parameter that two optimizers step; a wrapper of mmengine, whose losses know no loss scale.
        """
        ours = [other for other in others if isinstance(other, AmpOptimWrapper) or not self.policy.enabled]
        if foreign := [other for other in others if other not in ours]:
            raise AmpAttachError(
                f'{type(foreign[0]).__name__} of mmengine beside AmpOptimWrapper: gradients that one brings to the other would '
                f"carry a wrong loss scale. Write AmpOptimWrapper(opt_level='O0') in its place, which trains in FP32."
            )
        self._engine.label = name
        self.log_prefix = f'train/{name}_' if name else 'train/'
        self._engine.join(other._engine for other in ours if isinstance(other, AmpOptimWrapper))

    def attach(self, model: nn.Module, foreign: Iterable[Tensor] = ()) -> None:
        """Cast the model and make the masters, once, from its present weights. mmengine's runner needs no call.

        Args:
            model: FP32, initialised or loaded; wrapped in DDP or not. Under DDP, every rank calls this.
            foreign: Parameters that other wrappers step.

        Raises:
            AmpAttachError: Trainable weights are 16-bit already (``from_16bit`` takes them), beyond the range of float16, or
                cast already; the model is wrapped in a way that cannot be followed; the optimizer steps nothing of it.
            AmpConfigError: A ``keep_fp32`` pattern that matches nothing.
        """
        if not self._engine.attached:
            attaching.attach(self._engine, model, foreign)

    def detach(self) -> None:
        """Give the model its FP32 weights (the masters) and the optimizer its own parameters. Under DDP, on every rank.

        Raises:
            AmpUsageError: Gradients are waiting for a step.
        """
        detach(self._engine)

    def weights_changed(self, tensors: Iterable[Tensor] | None = None) -> list[str]:
        """Say that model weights were edited through ``.data``, right after it: masters take the new values. Syncs.

        Args:
            tensors: The edited parameters; all of them by default. Split weights, whose remainder becomes 0, have to be named.

        Returns:
            The names of the weights that differed from their masters; of all that are split among ``tensors``.

        Raises:
            AmpUsageError: No ``tensors``, and the weights are split, or a master was written to as well; a master among them.
        """
        return self._engine.params.changed('weight', tensors)

    def masters_changed(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Say that FP32 masters were edited through ``.data``, right after it: weights take the new values. No host read.

        Args:
            tensors: The edited masters; all of them by default. Split weights have to be named.

        Raises:
            AmpUsageError: No ``tensors``, and the weights are split, or a weight was written to as well; a weight among them.
        """
        self._engine.params.changed('master', tensors)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """As mmengine's wrapper does, and cast the model: its weights were initialised or loaded by now."""
        super().initialize_count_status(model, init_counts, max_counts)
        attaching.attach_members(self._engine, model)

    @eager_block
    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Around preprocessing and forward: attaches, autocasts, and keeps DDP from synchronising while accumulating.

        Args:
            model: The model, wrapped or not.
        """
        attaching.attach_members(self._engine, model)
        before_forward(self._engine, model)
        with super().optim_context(model), forward_context(self._engine, model):
            yield

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: dict[str, Any] | None = None,
        zero_kwargs: dict[str, Any] | None = None,
        loss_id: int = 0,
    ) -> None:
        """Backward, and where ``should_update()`` says so, step and clear.

        Args:
            loss: Scalar, of any floating type.
            step_kwargs: For ``step``.
            zero_kwargs: For ``zero_grad``.
            loss_id: Which scaler, below ``num_losses``.
        """
        self.backward(self.scale_loss(loss), loss_id=loss_id)
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: Tensor, loss_id: int = 0, **kwargs: Any) -> None:
        """Backward of the loss times the loss scale.

        Args:
            loss: Scalar, of any floating type.
            loss_id: Which scaler, below ``num_losses``.
            **kwargs: For :meth:`torch.Tensor.backward`.

        Raises:
            AmpUsageError: No such loss; several of which FSDP2 keeps the gradients; a level that casts, and no model yet.
        """
        self._last = None
        if not self._engine.attached:
            attach_engine(self._engine, None)
        backward(self._engine, loss, loss_id, **kwargs)
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Unscale, check, clip and step; skipped as a whole where a gradient is non-finite. Syncs once, but not with optimizers
        that read the flag on the device: ours, and those of torch with ``fused=True``.

        Args:
            **kwargs: For the optimizer's ``step``.

        Raises:
            AmpUsageError: No backward since the last step, or a closure under a loss scale.
            OverflowStreakError: ``max_consecutive_skips`` steps in a row were non-finite.
        """
        if self._clip is not None and self._clip.arguments is not self.clip_grad_kwargs:
            # mmengine's users may change the limit between steps
            self._clip = dataclasses.replace(self._clip, arguments=self.clip_grad_kwargs)
        result = take_step(self._engine, self._clip, **kwargs)
        self._last = result
        if result.info is not None:
            words = {'grad_norm': getattr(self, 'grad_name', ''), 'loss_scale': 'amp_scale', 'skips': 'amp_skipped'}
            shown, prefix = dict[str, int](), self.log_prefix
            for name in result.shows:
                shown[prefix + words[name]] = COLUMNS[name]
            self.device_log.update(result.info, shown, result.skipped is None, {f'{prefix}amp_skipped'})

    def step_was_skipped(self) -> bool:
        """Whether the step since the last backward pass was left out. Syncs, where the host does not know."""
        return self._last is not None and self._last.was_skipped()

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of model weights and masters; ``kwargs`` are those of ``Optimizer.zero_grad``."""
        self._engine.zero_grad(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict with ``base_param_settings``, ``loss_scaler`` and ``amp``. Syncs.

        Returns:
            Plain tensors, numbers, strings, lists and dicts. Masters are not in it: the model's state dict holds them.
        """
        state = engine_state.state_of(self._engine)
        if self.policy.enabled:
            # mmengine sets the count of a resumed wrapper, but not of the members of an OptimWrapperDict
            amp_part(state)['inner_count'] = self._inner_count
        if self.base_param_settings is not None:
            state['base_param_settings'] = self.base_param_settings
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Check what :meth:`load_state_dict` would be given, and apply nothing.

        Args:
            state_dict: Not changed.

        Raises:
            AmpCheckpointError: Names the key and what was expected.
        """
        engine_state.check_state(self.optimizer, state_dict)

    def load_state_dict(self, state_dict: Any) -> None:
        """Resume from our own checkpoints, those of mmengine's own wrappers or apex's; logs what cannot be kept.

        Args:
            state_dict: Not changed.

        Raises:
            AmpCheckpointError: A checkpoint of another kind. Nothing has been applied.
        """
        state = {**state_dict} if isinstance(state_dict, Mapping) else state_dict
        base = state.pop('base_param_settings', None) if isinstance(state, dict) else None
        line = engine_state.load_state(self._engine, state)
        self._inner_count: int = amp_part(state).get('inner_count', self._inner_count)
        if base is not None:
            self.base_param_settings = dict(base)
        self._say(f'amp: {self._engine.label and self._engine.label + ": "}{line}')

    def __repr__(self) -> str:
        return f'{super().__repr__()}{self._engine!r}\n'

    def _say(self, line: str) -> None:
        if self.policy.verbosity >= 1:
            logger.info(line)


#: What ``__init__`` knows by name.
_OWN_ARGUMENTS = [name for name in AmpOptimWrapper.__init__.__annotations__ if name not in ('return', 'kwargs')]

# The stock names are taken over at the root, where every default_scope looks in the end: downstream --amp flags accept
# the bare string only. The stock class stays within reach under another name.
ROOT_OPTIM_WRAPPERS.register_module(name='TorchAmpOptimWrapper', module=TorchAmpOptimWrapper, force=True)
ROOT_OPTIM_WRAPPERS.register_module(name='AmpOptimWrapper', module=AmpOptimWrapper, force=True)

__all__ = ['AmpOptimWrapper', 'TorchAmpOptimWrapper']
