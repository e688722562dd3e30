"""Which name of apex is which name here, and what to write for those that are none."""

from __future__ import annotations

DDP = 'torch.nn.parallel.DistributedDataParallel'
INITIALIZE = 'amp_wrapper.amp.initialize'

AMP_NAMES = (
    'initialize',
    'scale_loss',
    'master_params',
    'state_dict',
    'load_state_dict',
    'disable_casts',
    'init',
    'half_function',
    'bfloat16_function',
    'float_function',
    'promote_function',
    'register_half_function',
    'register_bfloat16_function',
    'register_float_function',
    'register_promote_function',
)

#: What :mod:`amp_wrapper.amp` has beside them: scripts that use it were migrated already.
OWN_NAMES = (
    'last_step_skipped',
    'loss_scale',
    'masters_changed',
    'monitor',
    'report',
    'skipped_steps',
    'suggest_level',
    'weights_changed',
)

#: Names whose meaning survives a change of name. What hangs below a name moves with it.
RENAMED: dict[str, str] = {
    'apex': 'amp_wrapper',
    'apex.amp': 'amp_wrapper.amp',
    **{f'apex.amp.{name}': f'amp_wrapper.amp.{name}' for name in AMP_NAMES},
    **{f'apex.amp.amp.{name}': f'amp_wrapper.amp.{name}' for name in AMP_NAMES[6:]},
    **{f'apex.amp.frontend.{name}': f'amp_wrapper.amp.{name}' for name in ('initialize', *AMP_NAMES[3:5])},
    **{f'apex.amp.handle.{name}': f'amp_wrapper.amp.{name}' for name in ('scale_loss', 'disable_casts')},
    'apex.amp._amp_state.master_params': 'amp_wrapper.amp.master_params',
    'apex.parallel.DistributedDataParallel': DDP,
    'apex.parallel.distributed.DistributedDataParallel': DDP,
    'apex.parallel.convert_syncbn_model': 'torch.nn.SyncBatchNorm.convert_sync_batchnorm',
    'apex.parallel.SyncBatchNorm': 'torch.nn.SyncBatchNorm',
    'apex.parallel.sync_batchnorm.SyncBatchNorm': 'torch.nn.SyncBatchNorm',
    'apex.parallel.optimized_sync_batchnorm.SyncBatchNorm': 'torch.nn.SyncBatchNorm',
    **{
        f'apex.normalization{module}.{kind}{name}': f'torch.nn.{new}'
        for module in ('', '.fused_layer_norm')
        for kind in ('Fused', 'MixedFused')
        for name, new in (('LayerNorm', 'LayerNorm'), ('RMSNorm', 'RMSNorm'))
    },
    'mmengine.optim.ApexOptimWrapper': 'amp_wrapper.ApexOptimWrapper',
    'mmengine.optim.optimizer.ApexOptimWrapper': 'amp_wrapper.ApexOptimWrapper',
    'mmengine.optim.optimizer.apex_optimizer_wrapper.ApexOptimWrapper': 'amp_wrapper.ApexOptimWrapper',
}

#: Names that are translated with the call around them, see the modules of this package.
WITH_CALL: dict[str, str] = {
    'apex.optimizers.FusedAdam': 'FusedAdam',
    'apex.optimizers.fused_adam.FusedAdam': 'FusedAdam',
    'apex.optimizers.FusedSGD': 'FusedSGD',
    'apex.optimizers.fused_sgd.FusedSGD': 'FusedSGD',
    'apex.amp._amp_state.loss_scalers': 'loss_scalers',
    'apex.amp._amp_state._amp_state.loss_scalers': 'loss_scalers',
    'apex.amp.frontend._amp_state.loss_scalers': 'loss_scalers',
    'apex.amp.handle._amp_state.loss_scalers': 'loss_scalers',
}

_INTERNAL = 'only apex itself used it, and it is not carried over'
_HALF = "amp.initialize casts the model: model = amp.initialize(model, opt_level='O2') (or 'O3' for inference)"
_MASTERS = (
    "amp keeps the FP32 masters: model, optimizer = amp.initialize(model, optimizer, opt_level='O2'), and "
    'amp.master_params(optimizer) are the masters'
)
_SCALER = "amp keeps the loss scale: amp.initialize(..., loss_scale='dynamic') or loss_scale=128.0, and amp.scale_loss"

#: What to write by hand. The longest entry that a name begins with counts.
LISTED: dict[str, str] = {
    'apex': 'not part of this package; apex still has it, or write it with torch',
    'apex.amp': 'no public name of apex.amp; see docs/migrating_from_apex.md for the ones there are',
    'apex.amp._amp_state': f"{_INTERNAL}; the loss scale is amp.state_dict()['loss_scaler0']['loss_scale'], the masters are "
    'amp.master_params(optimizer), and what amp.initialize was called with is known to your own code',
    'apex.amp._amp_state.handle': f'{_INTERNAL}; write amp.disable_casts() to suspend casts',
    'apex.amp._amp_state.opt_properties': f'{_INTERNAL}; keep the arguments of amp.initialize in a variable of your own',
    'apex.amp.frontend': f'{_INTERNAL}; amp.initialize, amp.state_dict and amp.load_state_dict are public',
    'apex.amp.handle': f'{_INTERNAL}; amp.scale_loss, amp.disable_casts and what amp.init returns are public',
    'apex.amp.scaler': f"{_INTERNAL}; give loss_scale='dynamic', a number, or dict(init_scale=...) to amp.initialize",
    'apex.amp.opt': f'{_INTERNAL}; write amp.init(...).wrap_optimizer(optimizer)',
    'apex.amp.lists': f'{_INTERNAL}; torch.autocast has the lists, and amp.register_half_function(module, name) and its '
    'siblings change them',
    'apex.amp.wrap': f'{_INTERNAL}; write amp.half_function, amp.float_function or amp.promote_function',
    'apex.amp.utils': f'{_INTERNAL}; write tensor.half() or tensor.float()',
    'apex.amp.compat': f'{_INTERNAL}; torch has had one tensor type since 0.4',
    'apex.amp.rnn_compat': f'{_INTERNAL}; RNN cells and layers need nothing at O1',
    'apex.amp.enable': 'of the oldest API: write amp_handle = amp.init()',
    'apex.amp.register_fp16': 'of the oldest API: write amp.half_function, or amp.register_half_function(module, name)',
    'apex.amp.register_fp32': 'of the oldest API: write amp.float_function, or amp.register_float_function(module, name)',
    'apex.parallel': 'torch.nn.parallel and torch.distributed have what remains of it',
    'apex.parallel.LARC': 'not part of this package; apex still has it: give amp.initialize and amp.scale_loss the '
    'optimizer inside it, or scale the rate by layer in your own code',
    'apex.parallel.Reducer': 'torch has none: use torch.nn.parallel.DistributedDataParallel with no_sync() until the last '
    'backward pass, or torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.AVG) for each parameter',
    'apex.parallel.create_syncbn_process_group': 'write torch.distributed.new_group(ranks) for the ranks of each group, and '
    'give the result to convert_sync_batchnorm(model, process_group)',
    'apex.parallel.multiproc': 'write torchrun --nproc_per_node=N script.py; it sets LOCAL_RANK in the environment',
    'apex.optimizers': 'not part of this package; use the nearest of torch.optim',
    'apex.optimizers.FusedAdam': 'is used without calling it here: write amp_wrapper.FusedAdamW (with weight_decay=0.0 where '
    'it is called, since 0.01 is its default) for adam_w_mode=True, amp_wrapper.FusedAdam for False',
    'apex.optimizers.FusedSGD': 'is used without calling it here: write amp_wrapper.FusedSGD',
    'apex.optimizers.FusedLAMB': 'not part of this package; the nearest is amp_wrapper.FusedAdamW (without the trust ratio '
    'of each layer, so the rate needs tuning); apex still has FusedLAMB, which works with amp.initialize on a GPU',
    'apex.optimizers.FusedMixedPrecisionLamb': 'not part of this package; the nearest is amp_wrapper.FusedAdamW, with '
    "amp.initialize(..., opt_level='O2') for the masters",
    'apex.optimizers.FusedNovoGrad': 'not part of this package; the nearest is amp_wrapper.FusedAdamW (other moments)',
    'apex.optimizers.FusedAdagrad': 'not part of this package; write torch.optim.Adagrad (eps=1e-10 in both; '
    'adagrad_w_mode=True has no counterpart)',
    'apex.normalization': 'write torch.nn.functional.layer_norm or torch.nn.functional.rms_norm',
    'apex.fp16_utils': 'gone from apex; see docs/migrating_from_apex.md',
    'apex.fp16_utils.FP16_Optimizer': "write model, optimizer = amp.initialize(model, optimizer, opt_level='O2', "
    'loss_scale=...), with the model in FP32',
    'apex.fp16_utils.network_to_half': _HALF,
    'apex.fp16_utils.BN_convert_float': f'{_HALF}, and keeps BatchNorm in FP32',
    'apex.fp16_utils.convert_network': _HALF,
    'apex.fp16_utils.convert_module': _HALF,
    'apex.fp16_utils.FP16Model': _HALF,
    'apex.fp16_utils.FP16_Module': _HALF,
    'apex.fp16_utils.tofp16': f'{_HALF}, and its inputs',
    'apex.fp16_utils.fp32_to_fp16': f'{_HALF}, and its inputs',
    'apex.fp16_utils.fp16_to_fp32': f'{_HALF}, and its outputs are FP32',
    'apex.fp16_utils.prep_param_lists': _MASTERS,
    'apex.fp16_utils.model_grads_to_master_grads': f'{_MASTERS}; amp.scale_loss fills their gradients',
    'apex.fp16_utils.master_params_to_model_params': f'{_MASTERS}; optimizer.step() copies them into the model',
    'apex.fp16_utils.clip_grad_norm': 'write torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)',
    'apex.fp16_utils.LossScaler': _SCALER,
    'apex.fp16_utils.DynamicLossScaler': _SCALER,
    'apex.fp16_utils.to_python_float': 'write tensor.item()',
    'apex.fp16_utils.Fused_Weight_Norm': 'write torch.nn.utils.parametrizations.weight_norm',
    'apex.multi_tensor_apply': 'write torch._foreach_* functions, or leave it to the optimizer',
    'apex.mlp': 'write torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU',
    'apex.fused_dense': 'write torch.nn.Linear',
    'apex.RNN': 'write torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN; they run in 16-bit at O1',
    'apex.reparameterization': 'write torch.nn.utils.parametrizations.weight_norm',
    'apex.pyprof': 'write torch.profiler.profile',
    'apex.contrib': 'not part of this package; apex still has most of it',
    'apex.contrib.xentropy': 'write torch.nn.CrossEntropyLoss; it has label_smoothing',
    'apex.contrib.clip_grad': 'write torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)',
    'apex.transformer': 'not part of this package; apex still has it',
}

#: Other homes of names in the table above.
_SAME = {
    'apex.fp16_utils.fp16util.': 'apex.fp16_utils.',
    'apex.fp16_utils.loss_scaler.': 'apex.fp16_utils.',
    'apex.fp16_utils.fp16_optimizer.': 'apex.fp16_utils.',
    'apex.contrib.optimizers.FP16_Optimizer': 'apex.fp16_utils.FP16_Optimizer',
    'apex.optimizers.FP16_Optimizer': 'apex.fp16_utils.FP16_Optimizer',
    'apex.parallel.distributed.': 'apex.parallel.',
    'apex.parallel.LARC.LARC': 'apex.parallel.LARC',
    'apex.optimizers.fused_adam.': 'apex.optimizers.',
    'apex.optimizers.fused_sgd.': 'apex.optimizers.',
    'apex.optimizers.fused_lamb.': 'apex.optimizers.',
    'apex.optimizers.fused_novograd.': 'apex.optimizers.',
    'apex.optimizers.fused_adagrad.': 'apex.optimizers.',
}

#: What ``from module import *`` brings, as far as it is used.
STARS: dict[str, frozenset[str]] = {
    module: frozenset(
        name.removeprefix(f'{module}.')
        for name in (*RENAMED, *WITH_CALL, *LISTED)
        if name.startswith(f'{module}.') and '.' not in name.removeprefix(f'{module}.')
    )
    for module in ('apex', 'apex.amp', 'apex.parallel', 'apex.optimizers', 'apex.fp16_utils', 'apex.normalization')
}

#: Modules of apex from which names hang: an import of one of them binds a module.
MODULES = frozenset(STARS) | {
    'apex.contrib',
    'apex.amp.frontend',
    'apex.amp.handle',
    'apex.normalization.fused_layer_norm',
}

#: Modules that apex has no more.
GONE = ('apex.amp', 'apex.fp16_utils')

#: Modules that ``from module import name`` may be written for.
IMPORTABLE = ('amp_wrapper', 'amp_wrapper.amp', 'torch.nn', 'torch.nn.parallel')

#: Names of this package and of torch that are looked at once more, for what an earlier run left to do by hand.
ONCE_MORE: dict[str, str] = {
    'amp_wrapper.amp': 'apex.amp',
    DDP: 'apex.parallel.DistributedDataParallel',
    'torch.nn.SyncBatchNorm.convert_sync_batchnorm': 'apex.parallel.convert_syncbn_model',
    'torch.nn.SyncBatchNorm': 'apex.parallel.SyncBatchNorm',
    'amp_wrapper.FusedAdam': 'apex.optimizers.FusedAdam',
    'amp_wrapper.FusedAdamW': 'apex.optimizers.FusedAdam',
    'amp_wrapper.FusedSGD': 'apex.optimizers.FusedSGD',
}


def prefixes(name: str) -> list[str]:
    """The name and what it begins with, longest first: a.b.c, a.b, a."""
    parts = name.split('.')
    return ['.'.join(parts[:count]) for count in range(len(parts), 0, -1)]


def advice(name: str) -> str:
    """What to write instead of a name of apex that has no counterpart."""
    for long, short in _SAME.items():
        if name.startswith(long):
            name = short + name.removeprefix(long)
    return next((LISTED[prefix] for prefix in prefixes(name) if prefix in LISTED), LISTED['apex'])


def find(name: str) -> tuple[str, str] | None:
    """Where a name of apex goes.

    Returns:
        The longest part of it that :data:`RENAMED` or :data:`WITH_CALL` knows, and what hangs below. None where nothing of
        it goes anywhere, or less than :data:`LISTED` says.
    """
    for prefix in prefixes(name):
        if prefix in WITH_CALL or prefix in RENAMED:
            rest = name.removeprefix(prefix)
            # of a module that goes as a whole, only the names above are there
            if rest and prefix in ('apex', 'apex.amp'):
                return None
            return prefix, rest
        if prefix in LISTED and prefix not in MODULES:
            return None
    return None
