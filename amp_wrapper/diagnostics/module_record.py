"""Records what each module of a model is called with, gives and computes: types, ops and the reasons for FP32, ranges."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..casting import kernels
from ..casting.cast_module import Watcher
from ..casting.functions import CallRule
from ..casting.kept import BATCHNORM, LOSS, Kept
from ..casting.modules import is_batchnorm
from ..policy import Policy, dtype_name
from ..policy.autocast_lists import HALF, OP_RULES, OpRule
from ..policy.fp32_registry import Fp32Op
from ..policy.nested import HALF_TYPES
from ..torch_internals import TorchDispatchMode
from .op_tensors import memory_of, numbers
from .rounding import Gathering

#: What is called outside of the model: a loss function.
OUTSIDE = '(outside the model)'
#: Ops that compute nothing of the values of their input, by their names without overload.
_NO_COMPUTATION = frozenset(
    {
        *('alias', 'clone', 'copy', 'copy_', 'detach', 'detach_', 'fill_', 'lift_fresh', 'resize_', 'set_', 'zero_'),
        *('empty_like', 'full_like', 'ones_like', 'rand_like', 'randn_like', 'zeros_like'),
        *('new_empty', 'new_empty_strided', 'new_full', 'new_ones', 'new_zeros'),
    }
)
_CASTS = frozenset({'_to_copy'})
# functions by which a script casts by itself
_OWN_CASTS = frozenset({'to', 'float', 'half', 'bfloat16', 'double', 'type', 'type_as', '__get__', 'copy_'})


@dataclasses.dataclass(frozen=True)
class OpRun:
    """An op of torch with floating or complex input, as it ran.

    Attributes:
        op: Its name in the dispatcher, such as 'mm' or 'native_layer_norm'.
        inputs: Types of its floating and complex inputs, each once, in order.
        output: Type of its first such output; '' where it has none.
        type: The widest of the types of the inputs: what it computes in.
        rule: For FP32 at a 16-bit level: one of :data:`RULES`; '' otherwise.
        name: The entry of the registry or of ``keep_fp32``, the module or the function that the rule is about; or ''.
        reason: Why, in words.
    """

    op: str
    inputs: tuple[str, ...]
    output: str
    type: str
    rule: str = ''
    name: str = ''
    reason: str = ''


#: Why something runs in FP32 at a 16-bit level: what a rule is called in reports, and what it means.
RULES = {
    'keep_fp32': 'the module is named by keep_fp32',
    'batchnorm': BATCHNORM.reason,
    'loss': LOSS.reason,
    'registry': 'the function or module is in the FP32 registry',
    'fp32_ops': 'the function or module is named by fp32_ops',
    'method': 'a method of a head, which turns outputs into losses or predictions',
    'user rule': 'float_function, register_float_function or their like',
    'autocast': 'the op is in the FP32 list of autocast',
    'average': 'the module is an average of weights',
    'shared': 'the module shares a tensor with one that stays FP32',
    'FP32 weights': 'weights of the model are FP32 at this level, and the op takes them as they are',
    'float64': 'a float64 tensor is among its inputs, and no level casts such tensors',
    'complex': 'a complex tensor is among its inputs, and no level casts such tensors',
    'outside': 'the op runs outside of the model, whose outputs are FP32',
    'mixed types': 'a 16-bit tensor meets an FP32 one, and torch computes in the wider type',
    'FP32 input': 'nothing casts the op, and its input is FP32 already',
}


class ModuleRecord:
    """What one module did.

    Attributes:
        calls: How often it was called in the forward pass.
        given: Types of floating inputs as they came.
        inputs: The same, as its ``forward`` had them.
        outputs: Types of floating outputs as its ``forward`` gave them.
        handed: The same, as the caller got them.
        gradients: Types of the gradients of its outputs.
        ops: Ops that ran in it, and in no module below it, and how often.
        casts: How often floating tensors were cast there, by ('float32', 'float16').
        kept: Why it stays in FP32; None where it does not.
        ranges: 'inputs', 'outputs' and 'output_gradients', where they are measured.
    """

    def __init__(self, rounds: bool, scale: float | None = None) -> None:
        self.calls = 0
        self.given: dict[str, None] = {}
        self.inputs: dict[str, None] = {}
        self.outputs: dict[str, None] = {}
        self.handed: dict[str, None] = {}
        self.gradients: dict[str, None] = {}
        self.ops: Counter[OpRun] = Counter()
        self.casts: Counter[tuple[str, str]] = Counter()
        self.kept: Kept | None = None
        self.ranges = {key: Gathering(rounds) for key in ('inputs', 'outputs')}
        self.ranges['output_gradients'] = Gathering(rounds, scale)


@dataclasses.dataclass
class _Call:
    """A call of a function of torch by the model."""

    name: str
    autocast: bool
    raised: bool = False


class ModuleRecorder:
    """Records one forward pass, and the backward pass after it. The model is a copy that is thrown away: its hooks stay.

    Args:
        model: Attached at its level.
        policy: The level.
        kept: The modules that the cast keeps in FP32, by id.
        rounds: Whether rounding is measured, beside ranges.
        scale: Of :class:`~amp_wrapper.diagnostics.rounding.Gathering`, for gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        kept: Mapping[int, Kept],
        rounds: bool = False,
        scale: float | None = None,
    ) -> None:
        self.policy = policy
        self.records: dict[str, ModuleRecord] = {}
        self._is_forward = False
        # with ranges: their ops are none of the model
        self._is_busy = False
        # whether a module's arguments or outputs are being cast
        self._casts = False
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self._told: list[tuple[Any, Any]] = []
        self._call: _Call | None = None
        #: Outputs, and their gradients, of all modules together: a tensor that several of them hand on counts once.
        self.totals = {'outputs': Gathering(rounds), 'output_gradients': Gathering(rounds, scale)}
        self._held = {memory_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._weights = {memory_of(tensor) for tensor in model.parameters()}
        # running statistics, which are an input of the op as its weights are
        self._weights |= {memory_of(t) for each in model.modules() if is_batchnorm(each) for t in each.buffers(False)}
        for name, module in model.named_modules():
            self.records[name] = ModuleRecord(rounds, scale)
            if not isinstance(module, torch.jit.ScriptModule):
                above = self.records[name.rpartition('.')[0]]
                self.records[name].kept = above.kept or kept.get(id(module))
                self._watch(module, name)
        self.records[OUTSIDE] = ModuleRecord(rounds, scale)

    def _watch(self, module: nn.Module, name: str) -> None:
        record = self.records[name]

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_forward:
                self._stack.append(name)
                record.calls += 1
                _note(record.given, numbers((args, kwargs)))
                self._casts = True

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_forward:
                self._casts = False
                tensors = numbers((args, kwargs))
                _note(record.inputs, tensors)
                self._measure(record, 'inputs', tensors)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            tensors = numbers(output)
            if self._is_forward:
                _note(record.outputs, tensors)
                self._measure(record, 'outputs', tensors)
                self._casts = True
            for tensor in tensors:
                if tensor.requires_grad:
                    # also in a segment that runs again: the graph of its first run is gone, where that had one
                    tensor.register_hook(lambda gradient: self._gradient(record, gradient))  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, output: Any) -> None:
            if self._is_forward:
                self._casts = False
                _note(record.handed, numbers(output))
                # a module whose call has failed leaves those below it open
                while self._stack and self._stack.pop() != name:
                    pass

        Watcher(enter, leave).watch(module)
        module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(end, prepend=True)

    def _measure(self, record: ModuleRecord, key: str, tensors: Sequence[Tensor]) -> None:
        self._is_busy = True
        try:
            with torch.no_grad():
                record.ranges[key].add(tensors, self.totals.get(key))
        finally:
            self._is_busy = False

    def _gradient(self, record: ModuleRecord, gradient: Tensor) -> None:
        _note(record.gradients, [gradient])
        self._measure(record, 'output_gradients', [gradient])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass and the loss."""
        self._is_forward = True
        try:
            with ExitStack() as stack:
                stack.enter_context(kernels.listening(self._listen))
                stack.enter_context(_Functions(self))
                stack.enter_context(_Ops(self))
                yield
        finally:
            self._is_forward = False
            self._stack.clear()

    # -- the listener of rules ------------------------------------------------------------------------------------------

    @contextmanager
    def _listen(self, rule: Any, function: Any) -> Iterator[None]:
        """A call by a rule, on any thread."""
        is_mine = threading.get_ident() == self._thread
        if is_mine:
            self._told.append((rule, function))
        try:
            yield
        finally:
            if is_mine:
                self._told.pop()

    # -- ops ------------------------------------------------------------------------------------------------------------

    def op_ran(self, op: Any, args: Any, kwargs: Any, output: Any) -> None:
        """An op of torch has run."""
        # the engine copies buffers in the hooks of the model, by ops of this package
        if self._is_busy or op.namespace == 'amp_wrapper':
            return
        inputs, outputs = numbers((args, kwargs)), numbers(output)
        name = op.overloadpacket.__name__
        record = self.records[self._stack[-1] if self._stack else OUTSIDE]
        if name in _CASTS:
            if inputs and outputs and inputs[0].dtype is not outputs[0].dtype:
                record.casts[dtype_name(inputs[0].dtype), dtype_name(outputs[0].dtype)] += 1
                if self._call is not None and inputs[0].dtype in HALF_TYPES:
                    self._call.raised = True
            return
        if not inputs or self._casts or name in _NO_COMPUTATION or _is_view(inputs, outputs):
            return
        types = list(dict.fromkeys(tensor.dtype for tensor in inputs))
        widest = types[0]
        for dtype in types[1:]:
            widest = torch.promote_types(widest, dtype)
        run = OpRun(
            name,
            tuple(map(dtype_name, types)),
            dtype_name(outputs[0].dtype) if outputs else '',
            dtype_name(widest),
            *(('', '', '') if widest in HALF_TYPES or not self.policy.runs_16_bit else self._why(record, inputs)),
        )
        record.ops[run] += 1

    def _why(self, record: ModuleRecord, inputs: Sequence[Tensor]) -> tuple[str, str, str]:
        """Rule, name and reason of an op that runs in FP32."""
        if record.kept is not None:
            return record.kept.rule, record.kept.name, record.kept.reason
        told = next((each for each in self._told if not _is_half(each[0])), None)
        if told is not None:
            rule, function = told
            label = getattr(function, '__qualname__', None) or getattr(function, '__name__', None) or str(function)
            if isinstance(rule, Fp32Op):
                if rule.name == '*':
                    return 'method', label, rule.reason
                named = any(rule.name == extra.name for extra in self.policy.fp32_ops)
                return 'fp32_ops' if named else 'registry', rule.name, rule.reason
            if isinstance(rule, OpRule):
                return 'autocast', rule.op, rule.reason
            assert isinstance(rule, CallRule)
            wanted = 'float32' if rule.dtype is torch.float32 else 'the widest type'
            return 'user rule', label, f'a function that the script lets run in {wanted}'
        call = self._call
        if call is not None and call.autocast and call.raised and call.name not in _OWN_CASTS:
            return 'autocast', call.name, _autocast_reason(call.name)
        wide = [tensor for tensor in inputs if tensor.dtype not in HALF_TYPES]
        if any(tensor.is_complex() for tensor in wide):
            found = 'complex'
        elif any(tensor.dtype is torch.float64 for tensor in wide):
            found = 'float64'
        elif all(memory_of(t) in self._held for t in wide) and any(memory_of(t) in self._weights for t in wide):
            found = 'FP32 weights'
        elif len(wide) < len(inputs):
            found = 'mixed types'
        else:
            found = 'outside' if record is self.records[OUTSIDE] else 'FP32 input'
        return found, '', RULES[found]


class _Functions(TorchFunctionMode):
    """Notes which function of torch the model is calling, and whether autocast is on around it."""

    def __init__(self, recorder: ModuleRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, before = self._recorder, self._recorder._call
        if recorder._is_busy:
            return function(*args, **(kwargs or {}))
        devices = ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',)
        is_on = any(map(torch.is_autocast_enabled, devices))
        recorder._call = _Call(getattr(function, '__name__', ''), is_on)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            recorder._call = before


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a recorder of each op."""

    def __init__(self, recorder: ModuleRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        self._recorder.op_ran(op, args, kwargs or {}, output)
        return output


def _is_half(rule: Any) -> bool:
    """Whether a rule casts to 16-bit: what runs in FP32 inside does so for another reason."""
    return (isinstance(rule, CallRule) and rule.dtype in HALF_TYPES) or (isinstance(rule, OpRule) and rule.rule == HALF)


def _autocast_reason(name: str) -> str:
    found = next((rule.reason for op, rule in OP_RULES.items() if op.partition('.')[0] == name), '')
    return found or "on torch's own list for this device"


def _is_view(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether what an op gave is its input in another shape. Ops in place give their input itself."""
    if not outputs or any(outputs[0] is tensor for tensor in inputs):
        return False
    return memory_of(outputs[0]) in map(memory_of, inputs)


def _note(types: dict[str, None], tensors: Sequence[Tensor]) -> None:
    types.update(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors))
