"""The schema of every op.

``torch.ops.amp_wrapper.<name>``, the checks of the arguments, the fake kernel and the function that users call are all made
from it.
"""

from __future__ import annotations

import dataclasses
import re

NAMESPACE = 'amp_wrapper'

#: Elements of a decision, the numbers that hold for a step as a whole: skip (0 or 1), inverse scale, clip coefficient,
#: clip value, gradient norm (NaN where the step is skipped or there is none), loss scale after the step (NaN without one),
#: skipped steps so far, and in a row.
DECISION = 8
#: Elements of a row, the numbers that the update of one parameter needs. Adam: sign, decay, 1 - beta1, beta2,
#: 1 - beta2, root of the second bias correction, eps, minus step size, decoupled. SGD: sign, decay, momentum, 1 - dampening,
#: nesterov, minus lr, first.
ROW = 12
#: Hyper-parameters of one group. Adam: lr, beta1, beta2, eps, weight decay, maximize, decoupled. SGD: lr, momentum, dampening,
#: nesterov, weight decay, maximize, unused.
HYPER = 7
#: Columns of a count over powers of two: the 256 values of a float32's exponent field, and one for zeros.
EXPONENTS = 257
#: Kinds of optimizers.
ADAM, SGD = 0, 1

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
    'multi_tensor_exponents': '(Tensor[] tensors, Tensor(a!) counts, Tensor(b!) largest) -> ()',
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


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The tensors among the arguments of an op, by name in the order of its schema.

    Attributes:
        read: Lists that are read.
        written: Lists that are written.
        scalars: Tensors beside the lists: name to whether it is written.
        returns: Whether there is a result.
    """

    read: tuple[str, ...]
    written: tuple[str, ...]
    scalars: dict[str, bool]
    returns: bool

    @property
    def lists(self) -> tuple[str, ...]:
        """All lists."""
        return *self.read, *self.written


def _arguments(schema: str) -> Arguments:
    found = re.findall(r'Tensor(\(\w!\))?(\[\])?\?? (\w+)', schema)
    return Arguments(
        read=tuple(name for mark, is_list, name in found if is_list and not mark),
        written=tuple(name for mark, is_list, name in found if is_list and mark),
        scalars={name: bool(mark) for mark, is_list, name in found if not is_list},
        returns=not schema.endswith('-> ()'),
    )


#: The tensor arguments of each op in :data:`SCHEMAS`.
ARGUMENTS = {name: _arguments(schema) for name, schema in SCHEMAS.items()}
