"""Says in words why a step was not finite: where the infinities or NaN begin, and which setting mends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..casting import fp32_values
from ..casting.modules import class_name, is_loss
from ..engine import Engine
from ..errors import some
from ..policy import Policy, dtype_name
from ..policy.nested import HALF_TYPES
from .diagnosis import Diagnosis, complete
from .monitor import low_precision
from .op_tensors import elements
from .ranges import measure
from .recorder import StepRecord
from .remedies import Remedy, Trials, trials_of
from .replay import Replay, is_bad, replay
from .sandbox import Attach
from .trace import BadOp, moves_only

_LOOK_FOR = 'Look for a division by zero, a logarithm or a root of zero or less, and at the data.'
_LOSS_OPS = ('loss', 'binary_cross_entropy', 'cross_entropy', 'ctc')


def diagnose(
    step: StepRecord, model: nn.Module, engine: Engine, attach: Attach, several_ranks: bool = False
) -> Diagnosis:
    """Find out why a step was not finite, from what was recorded of it. Syncs, and takes some forward and backward passes.

    The model, its gradients, the optimizer and random states are left as they are.

    Args:
        step: What was recorded.
        model: Of the engine, with the weights that it had in the step.
        engine: Of the optimizer.
        attach: Attaches a copy of the model.
        several_ranks: Whether gradients are averaged over several ranks.
    """
    found = _Examination(step, model, engine, attach, several_ranks).run()
    if isinstance(model, nn.ModuleList):
        # several models that were initialised together, under the names that they have elsewhere
        found.module = named_in_list(found.module)
        found.parameters = [named_in_list(name) for name in found.parameters]
    return found


def named_in_list(name: str) -> str:
    """``'models[0].fc'`` for ``'0.fc'``: the name of a module in one of several models."""
    place, _, rest = name.partition('.')
    if not place.isdigit():
        return name
    return f'models[{place}].{rest}' if rest else f'models[{place}]'


class _Examination:
    def __init__(self, step: StepRecord, model: nn.Module, engine: Engine, attach: Attach, several_ranks: bool) -> None:
        self._step, self._model, self._engine, self._attach = step, model, engine, attach
        self._several = several_ranks
        # the call that went wrong, once it is known
        self._examined = step
        self._policy: Policy = engine.policy
        self._dtype = low_precision(engine.policy)
        self._type_name = 'float32' if self._dtype is None else dtype_name(self._dtype)

    def run(self) -> Diagnosis:
        """Look at weights and state, then run the step again."""
        found = self._of_state() or self._of_replay()
        complete(found, self._step, self._policy)
        return found

    # -- weights and state -------------------------------------------------------------------------------------------

    def _of_state(self) -> Diagnosis | None:
        """Weights, buffers and optimizer state that are not finite, or out of range."""
        stepped = set(map(id, self._engine.weights()))
        named: dict[str, Tensor] = {
            name: p for name, p in self._model.named_parameters() if p.requires_grad and id(p) in stepped
        }
        exact = {name: _fp32(tensor) for name, tensor in named.items()}
        weights = [name for name, tensor in exact.items() if is_bad(tensor)]
        state = self._bad_state()
        if weights and state:
            places = some(list(state))
            text = f"The optimizer's state is not finite ({places}), and the weights that it stepped are not either."
            return self._of_names('optimizer_state', text, weights, exact)
        if weights:
            text = f'Weights are not finite: {some(weights)}. Steps with non-finite gradients are skipped: other code wrote to '
            text += 'them, gradients were changed after the check, or a step with a very large learning rate was taken.'
            text = self._eps_is_zero(weights) or text
            return self._of_names('weight', text, weights, exact)
        lost = [name for name, tensor in named.items() if is_bad(_local(tensor))]
        if lost and self._dtype is not None:
            most = max(measure({name: exact[name] for name in lost}).values(), key=lambda each: each.largest).largest
            text = (
                f'Weights are too large for {self._type_name}: {some(lost)}, up to {most:.3g} where {self._type_name} ends at '
                f'{torch.finfo(self._dtype).max:.5g}.'
            )
            found = self._of_names('weight_range', text, lost, exact)
            found.remedies = self._try(found.module, scales=False, judges_losses=False)
            return found
        return None

    def _eps_is_zero(self, weights: Sequence[str]) -> str:
        """What there is to say where 16-bit weights are stepped by themselves, and ``eps`` is zero in their type; or ''."""
        optimizer, types = self._engine.optimizer, {tensor.dtype for tensor in self._engine.weights()}
        eps = None if optimizer is None else optimizer.defaults.get('eps')
        dtype = next((each for each in types if each in HALF_TYPES), None)
        if self._policy.master_weights or dtype is None or not isinstance(eps, float) or not eps:
            return ''
        if float(torch.tensor(eps).to(dtype)) > 0:
            return ''
        return (
            f'Weights are not finite: {some(weights)}. The optimizer steps them in {dtype_name(dtype)}, where its '
            f'eps={eps:g} is zero, and so is a small second moment: 0 is divided by 0. A larger eps, such as 1e-4, mends that, '
            f'or a level with FP32 masters.'
        )

    def _bad_state(self) -> dict[str, str]:
        """What of the optimizer's state is not finite: 'weight: exp_avg'."""
        optimizer, found = self._engine.optimizer, {}
        if optimizer is None:
            return {}
        for parameter, values in optimizer.state.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and is_bad(_local(value)):
                    found[f'{self._engine.name(cast(nn.Parameter, parameter))}: {key}'] = key
        return found

    def _of_names(self, cause: str, text: str, names: Sequence[str], exact: Mapping[str, Tensor]) -> Diagnosis:
        module = names[0].rpartition('.')[0]
        found = Diagnosis(cause, text, module, self._kind_of(module), parameters=list(names))
        found.ranges = {f'weight {name}': each for name, each in measure({n: exact[n] for n in names[:8]}).items()}
        return found

    # -- the step again ----------------------------------------------------------------------------------------------

    def _of_replay(self) -> Diagnosis:
        if not self._step.calls:
            return Diagnosis('not_replayed', self._nothing_recorded())
        used = [call for call in self._step.calls if call.gradients]
        if used:
            # the others were for no loss of this step
            self._step = self._examined = dataclasses.replace(self._step, calls=used)
        if not all(call.is_unchanged for call in self._step.calls):
            text = 'The step could not be run again: its inputs were written to, by the model itself or after its forward pass.'
            return Diagnosis('not_replayed', text)
        again = everything = replay(self._step, self._model, self._policy, self._attach)
        if any(everything.calls):
            # what is wrong in one call goes on to the inputs of later ones, and to the gradients of earlier ones
            calls = everything.calls
            place = calls.index('outputs') if 'outputs' in calls else _last(calls, 'gradients')
            self._examined = StepRecord([self._step.calls[place]], self._step.losses)
            again = replay(self._examined, self._model, self._policy, self._attach, traced=True)
        if again.refused:
            return Diagnosis('not_replayed', f'The step could not be run again: {again.refused}')
        found = self._judge(again)
        found.outputs = again.outputs
        found.losses = sorted(everything.losses)
        found.parameters = found.parameters or again.parameters
        found.ranges |= {f'gradient {name}': each for name, each in list(again.gradients.items())[:64]}
        if again.first_gradient is not None:
            first = again.first_gradient
            found.first_gradient = f'{self._called(first.module)}: {first.node or first.op}'
        return found

    def _nothing_recorded(self) -> str:
        return 'The step could not be run again, for no forward call of it was recorded. ' + (
            'No tensor with a gradient was found in what the model returns.'
            if self._step.unseen
            else 'torch.compile hides them: train without it until the place is found.'
        )

    def _judge(self, again: Replay) -> Diagnosis:
        if not again.outputs_finite:
            return self._of_forward(again)
        if again.parameters:
            return self._of_backward(again)
        if not again.losses_finite or (any(is_bad(loss.value) for loss in self._step.losses) and not self._is_output()):
            return self._of_loss()
        if again.sums:
            text = f'Gradients of several backward passes are finite in {self._type_name}, and their sum is not: '
            found = Diagnosis('gradient_sum', text + some(again.sums) + '.', parameters=again.sums, phase='backward')
            found.module = again.sums[0].rpartition('.')[0]
            found.kind = self._kind_of(found.module)
            found.remedies = [Remedy('accumulate_in_fp32', 'accumulate_in_fp32=True', None, 'not tried')]
            found.remedies += self._try(found.module)
            return found
        if self._several:
            return Diagnosis(
                'other_rank', 'Everything is finite on this rank: see the report of the rank that has the cause.'
            )
        return Diagnosis(
            'not_reproduced',
            'The step was finite when it was run again. Either something that is not recorded has changed, such as a random '
            'generator of its own, a count of calls, or an op whose results differ from run to run. Or the gradients that are '
            'not finite do not come through the outputs of the model: a term of the loss on weights, a penalty on gradients, a '
            'hook that changes them.',
        )

    def _is_output(self) -> bool:
        """Whether the losses seem to be outputs of the model: what came back to it are single finite numbers."""
        gradients = [each for call in self._step.calls for kept in call.gradients.values() for each in kept.values()]
        return bool(gradients) and all(each.numel() == 1 and not is_bad(each) for each in gradients)

    def _of_forward(self, again: Replay) -> Diagnosis:
        place = again.forward
        assert place is not None
        if place.origin == 'input':
            text = f'What the model was given is not finite: {place.op} has {place.nonfinite:,} infinities or NaN '
            text += f'among {elements(place.shape):,} elements.'
            return self._at('input', text, place)
        if place.origin == 'weight':
            return self._at('weight', f'{place.op} is not finite.', place)
        if place.reads and moves_only(place.op) and place.inputs:
            numbers = f'numbers up to {place.largest_in:.3g}, and {dtype_name(place.dtype)} ends at '
            text = (
                f'What the model was given is too large: {place.reads} has {numbers}{torch.finfo(place.dtype).max:.5g}.'
            )
            found = self._at('input_range', text, place)
            found.remedies = self._try(place.module, scales=False, judges_losses=False)
            return found
        trials = self._trials(judges_losses=False)
        in_fp32 = trials.fp32()
        same = not in_fp32.refused and not in_fp32.outputs_finite
        cause = 'forward_nan' if same else 'forward_16bit' if place.reason else 'forward_range'
        if self._is_loss(place):
            cause = 'loss'
        if same:
            text = f'{self._begins(place)} So it is in FP32, too: this is no matter of precision. '
            text += 'Look at the data.' if place.reason else _LOOK_FOR
            found = self._at(cause, text, place)
            found.remedies = [Remedy('fp32', "opt_level='O0'", False)]
            return found
        text = f'{self._begins(place)} In FP32 the forward pass is finite.'
        if 'zero' in place.reason:
            text += f' What is zero there is a number too small for {dtype_name(place.dtype)}.'
        found = self._at(cause, text, place)
        found.remedies = self._try(place.module, scales=False, judges_losses=False, place=place)
        return found

    def _of_backward(self, again: Replay) -> Diagnosis:
        place = again.backward or again.first_gradient
        assert place is not None
        trials = self._trials()
        scale = trials.lower_scale()
        largest = max((float(loss.scale) for loss in self._step.losses if loss.scale is not None), default=1.0)
        if scale.finite and largest > 1:
            text = f'{self._begins(place)} Gradients carry the loss scale {largest:g} there; with {scale.setting} they fit.'
            if self._engine.scales.is_dynamic:
                text += ' A dynamic scale gets there by itself: nothing is to be done, unless steps are skipped over and over.'
            found = self._at('gradient_scale', text, place)
            found.remedies = [each for each in (scale, trials.bfloat16()) if each is not None]
            return found
        in_fp32 = trials.fp32()
        if not in_fp32.refused and not in_fp32.is_finite:
            text = f'{self._begins(place)} So it is in FP32 without a loss scale, too: this is no matter of precision. The '
            text += 'derivative is not finite there, as that of a root or a norm at zero, or 0 times infinity.'
            found = self._at('gradient_nan', text, place)
            found.remedies = [Remedy('fp32', "opt_level='O0'", False)]
            return found
        cause, text = 'gradient_range', 'It does not fit at any loss scale.'
        if place.reason:
            cause, text = 'gradient_16bit', 'In FP32 the backward pass is finite; a smaller loss scale does not help.'
        found = self._at(cause, f'{self._begins(place)} {text}', place)
        found.remedies = [*self._try(place.module, scales=False, place=place), scale]
        return found

    def _of_loss(self) -> Diagnosis:
        bad = [loss for loss in self._step.losses if is_bad(loss.value)]
        where = 'which is computed outside of the model'
        if bad:
            ids = ', '.join(f'loss {loss.loss_id}' for loss in bad) if self._policy.num_losses > 1 else 'the loss'
            made = f' ({bad[0].made_by})' if bad[0].made_by else ''
            text = f'The outputs of the model are finite, and {ids}{made}, {where}, is {float(bad[0].value.float().sum())}.'
        else:
            text = f'The outputs of the model and the loss are finite, and the gradient of the loss, {where}, is not.'
        text += ' Look at what turns outputs into the loss: a division, a logarithm, an empty target, 16-bit sums.'
        return Diagnosis('loss', text, phase='forward' if bad else 'backward', op=bad[0].made_by if bad else '')

    # -- places ------------------------------------------------------------------------------------------------------

    def _at(self, cause: str, text: str, place: BadOp) -> Diagnosis:
        module = place.module
        if place.origin == 'weight':
            module = place.op.rpartition('.')[0]
        found = Diagnosis(cause, text, module, self._kind_of(module), place.phase, place.op, place.source)
        if place.origin == 'weight':
            found.parameters = [place.op]
        for index, (ranges, dtype) in enumerate(zip(place.inputs, place.dtypes_in)):
            found.ranges[f'input {index} of {place.op} ({dtype_name(dtype)})'] = ranges
        if module or place.origin == 'op':
            own = dict(self._model.get_submodule(module).named_parameters(recurse=False)) if module else {}
            found.ranges |= {
                f'weight {module}.{name}': each
                for name, each in measure({key: _fp32(tensor) for key, tensor in own.items()}).items()
            }
        return found

    def _begins(self, place: BadOp) -> str:
        """Where it begins, and with which numbers."""
        where = self._called(place.module)
        what = 'NaN' if place.has_nan else 'infinite'
        numbers = f'{place.nonfinite:,} of {elements(place.shape):,} elements'
        came = f' from finite numbers up to {place.largest_in:.3g}' if place.inputs else ''
        if moves_only(place.op) and place.inputs and place.phase == 'forward':
            name, end = dtype_name(place.dtype), torch.finfo(place.dtype).max
            text = f'{name} overflow where numbers up to {place.largest_in:.3g} are cast in {where}: {numbers} '
            return text + f'become infinite ({name} ends at {end:.5g}).'
        node = place.node or 'a sum of gradients'
        phase = 'forward pass' if place.phase == 'forward' else f'backward pass ({node})'
        name = dtype_name(place.dtype)
        kind = f'NaN in {name}' if place.has_nan else f'{name} overflow'
        if place.reason:
            kind = f'{place.reason[0].upper()}{place.reason[1:]} in {name}'
        line = f' The line is {place.source}.' if place.source else ''
        return f'{kind} in the {phase} of {where}: {place.op} made {numbers} {what}{came}.{line}'

    def _called(self, module: str) -> str:
        shown = named_in_list(module) if isinstance(self._model, nn.ModuleList) else module
        return f'{shown} ({self._kind_of(module)})' if module else 'the model itself'

    def _kind_of(self, module: str) -> str:
        try:
            return class_name(self._model.get_submodule(module))
        except AttributeError:
            return ''

    def _is_loss(self, place: BadOp) -> bool:
        if any(word in place.op for word in _LOSS_OPS):
            return True
        names = place.module.split('.') if place.module else []
        return any(is_loss(self._model.get_submodule('.'.join(names[: end + 1]))) for end in range(len(names)))

    # -- remedies ----------------------------------------------------------------------------------------------------

    def _trials(self, judges_losses: bool = True) -> Trials:
        return trials_of(self._examined, self._model, self._policy, self._attach, judges_losses)

    def _try(
        self, module: str, scales: bool = True, judges_losses: bool = True, place: BadOp | None = None
    ) -> list[Remedy]:
        if not self._step.calls:
            return []
        trials = self._trials(judges_losses)
        found = [trials.keep(module), None if place is None else trials.functions(place)]
        found += [trials.bfloat16(), trials.lower_scale() if scales else None]
        return [each for each in found if each is not None]


def _last(calls: Sequence[str], status: str) -> int:
    return max((place for place, each in enumerate(calls) if each == status), default=0)


def _fp32(tensor: Tensor) -> Tensor:
    # found by the parameter itself, which no view of it is
    return _local(fp32_values.fp32_value(tensor) if tensor.dtype in HALF_TYPES else tensor).detach()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor
