"""What a cast does to a module: its class becomes one that casts around each call, as ``fully_shard`` makes one that gathers.

A class, and no hooks: torch calls a module with hooks in a slower way, does not look at hooks before it takes a compiled graph,
and closes nothing of theirs after an interrupt.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from .. import torch_internals
from ..compiler_internals import constant_when_traced, never_compiled
from ..errors import AmpAttachError, ScriptingError
from ..policy import said_once
from ..policy.copies import Copies
from ..policy.fp32_registry import FP32_METHODS
from ..policy.nested import CASTABLE, HALF_TYPES, EnterObject, cast_tensors, tensors_in
from . import checks, fp32_values, functions, kernels, recompute, region, state_dicts, type_errors
from .modules import own_tensors
from .rule import Rule, traced

#: Methods by which users and frameworks enter a model or a part of it without calling it: a region is opened there too.
ENTRY_METHODS: tuple[str, ...] = ('loss', 'predict', 'extract_feat', 'inference', *FP32_METHODS)

_FLOAT32 = frozenset({torch.float32})
#: Attributes that copies go without: that the module belongs to an attached model; to one that is trained with 16-bit weights,
#: of which deep copies are FP32; what lets weights follow their masters; that the next call looks for numbers beyond the range;
#: who watches.
_OF_THE_ORIGINAL = ('_amp_attached', '_amp_trained', '_amp_follower', '_amp_first', '_amp_watchers')


class CastModule(nn.Module):
    """Stands before the class of a module that is cast."""

    _amp: Rule | None = None
    #: Lets the weights of the whole model follow their masters; for modules that are called by themselves.
    _amp_follower: ReferenceType[Any] | None = None
    #: Those of :class:`.watcher.Watcher`.
    _amp_watchers: tuple[Any, ...] = ()
    _amp_first = False

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the class that casts from those who ask to be told of subclasses of a module's class."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module by its rule. Who kept ``module.__call__`` comes here as well, such as wrappers of torch.compile."""
        # torch.compile fails over super() inside of blocks
        call: Any = super()._call_impl
        rule = self._amp
        if self._amp_watchers and not torch.compiler.is_compiling():
            return _watched(self, call, args, kwargs)
        if rule is None or rule.is_idle or (rule.outermost and region.is_open()):
            return call(*args, **kwargs)
        return _by_rule(self, call, args, kwargs)

    def _call_own(self, *args: Any, **kwargs: Any) -> Any:
        """As ``_call_impl``, where the class of the module has a ``__call__`` of its own."""
        call = super().__call__
        if self._amp_watchers and not torch.compiler.is_compiling():
            return _watched(self, call, args, kwargs)
        return _by_rule(self, call, args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuses half(), float(), to(dtype) and their like, and moves masters with their weights."""
        for module in self.modules():
            # before anything is changed
            if isinstance(module, CastModule) and module._amp is not None and '_amp_attached' in vars(module):
                checks.refuse_conversion(module, fn, module._amp.level)
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in self._parameters.values():
            if weight is not None:
                fp32_values.follow_device(weight)
        return result

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Lets loaded values reach the masters unrounded."""
        load = functools.partial(super()._load_from_state_dict, state_dict, prefix, *args, **kwargs)
        if self._amp is None or not self._amp.casts:
            load()
        else:
            state_dicts.load(self, load, state_dict, prefix)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        memo[id(self._amp)] = self._amp
        if _copies_itself(self):
            cls = type(self)
            self.__class__ = base_of(cls)  # type: ignore[assignment]
            try:
                copied = copy.deepcopy(self, memo)
            finally:
                self.__class__ = cls
            put(copied, self._amp or Rule())
            for name in _OF_THE_ORIGINAL:
                vars(copied).pop(name, None)
        else:
            make, words, state = self.__reduce_ex__(4)[:3]  # type: ignore[misc]
            copied = memo[id(self)] = make(*words)  # type: ignore[operator]
            copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        if '_amp_trained' in vars(self):
            take_off(copied)
            for (_, mine), (_, theirs) in zip(own_tensors(copied), own_tensors(self)):
                state_dicts.become_fp32(mine, theirs)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not _copies_itself(self):
            state = {name: value for name, value in self.__getstate__().items() if name not in _OF_THE_ORIGINAL}  # type: ignore[no-untyped-call]
            return _rebuild, (base_of(type(self)),), state
        cls = type(self)
        self.__class__ = base_of(cls)  # type: ignore[assignment]
        try:
            make, words, *rest = self.__reduce_ex__(max(protocol, 2))
        finally:
            self.__class__ = cls
        return _cast_again, (make, words, self._amp), *rest

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _install(self)

    def __prepare_scriptable__(self) -> Any:
        raise ScriptingError(
            'torch.jit.script cannot compile the casts of a model that mixed precision is attached to. Write '
            'torch.jit.trace(model, example), which records them, or load model.state_dict() into a new FP32 model and script '
            'that one.'
        )

    @constant_when_traced
    def _is_traced(self) -> bool:
        follower = None if self._amp_follower is None else self._amp_follower()
        if follower is not None:
            follower.is_traced()
        return True


def _watched(module: CastModule, call: Any, args: Any, kwargs: Any) -> Any:
    """A call that others watch from outside of its casts."""
    watchers, output = module._amp_watchers, None
    try:
        for watcher in watchers:
            watcher.enter(module, args, kwargs)
        output = _by_rule(module, call, args, kwargs)
    finally:
        for watcher in watchers:
            watcher.leave(module, output)
    return output


def _by_rule(module: CastModule, call: Any, args: Any, kwargs: Any) -> Any:
    rule = module._amp
    if rule is None or (rule.outermost and region.is_open()):
        return call(*args, **kwargs)
    if module._amp_follower is not None and not region.is_open():
        _follow(module)
    copies = rule.copies(args, kwargs)
    if copies is None and rule.outputs is None and not rule.opens and not rule.sets_autocast:
        return call(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return _trace(module, rule, call, copies, args, kwargs)
    before = said_once.speaks(rule.speaks) if rule.is_model else None
    try:
        return _run(module, rule, call, copies, args, kwargs)
    except (RuntimeError, TypeError) as error:
        if rule.is_model:
            type_errors.explain(module, error, rule.level)
        raise
    finally:
        if copies is not None:
            copies.write_back()
        if before is not None:
            said_once.speaks(before)


def _follow(module: CastModule) -> None:
    """Let the weights of a module that is called by itself follow their masters."""
    if torch.compiler.is_dynamo_compiling():
        module._is_traced()
    else:
        # with those below, which some modules use without calling them
        fp32_values.agree(module.parameters())


def _trace(module: CastModule, rule: Rule, call: Any, copies: Copies | None, args: Any, kwargs: Any) -> Any:
    """A call that is becoming part of a graph."""
    if not region.is_open():
        # what errors have left
        traced.clear()
    if copies is not None:
        traced.append(copies)
    if rule.is_model:
        said_once.speaks(rule.speaks)
    result = _run(module, rule, call, copies, args, kwargs)
    if copies is not None:
        traced.pop()
        copies.write_back()
    return result


def _run(module: CastModule, rule: Rule, call: Any, copies: Copies | None, args: Any, kwargs: Any) -> Any:
    caller = _first_half(args, kwargs) if rule.warning or rule.gives_back else None
    if caller is not None and rule.warning:
        said_once.warn_once(rule.warning)
    device = _device(module, args, kwargs) if rule.sets_autocast else 'cpu'
    if copies is not None:
        args, kwargs = rule.cast(copies, args, kwargs)
        if module._amp_first and _has_values():
            del module._amp_first
            if copies.clamped():
                said_once.warn_clamped(type(module).__name__, None, copies.target)
    if rule.opens or rule.sets_autocast:
        region.reach()
        if rule.is_model:
            functions.look_around()
        if rule.opens == region.TABLES:
            kernels.install_tables(device)
        with region.spare(rule.opens), region.operands(rule.opens):
            with region.autocast(device, rule.autocast) if rule.sets_autocast else nullcontext():
                result = call(*args, **kwargs)
    else:
        result = call(*args, **kwargs)
    dtype = caller if rule.gives_back else rule.outputs
    if dtype is None or (rule.only_eval and module.training):
        return result
    if rule.clamps:
        return Copies(dtype).cast(result)
    return cast_tensors(result, dtype, _FLOAT32 if rule.gives_back else CASTABLE, rule.enter)


# where a graph breaks inside of them they run as they are, and what they call may be compiled
for _function in (_by_rule, _trace, _run):
    never_compiled(_function)


def _first_half(args: Any, kwargs: Any) -> torch.dtype | None:
    for tensor in tensors_in((args, kwargs)):
        if tensor.dtype in HALF_TYPES:
            return tensor.dtype
    return None


def _device(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Where a call works: at the first tensor of the module, or at the first that it is handed."""
    for own in (module._parameters, module._buffers):
        for tensor in own.values():
            if tensor is not None:
                return tensor.device.type
    return region.device_of(itertools.chain(module.parameters(), module.buffers(), tensors_in((args, kwargs))))


def _has_values() -> bool:
    """Whether numbers of tensors can be read: not where a call is recorded or transformed."""
    return not (torch.compiler.is_compiling() or torch_internals.in_function_transform(or_mode=True))


# -- classes -----------------------------------------------------------------------------------------------------------------


def class_for(base: Any) -> type[nn.Module]:
    """The class that casts for the class of a module.

    Raises:
        AmpAttachError: No class can be derived from it.
    """
    # Python knows them by weak references: a class goes with its last module
    for known in base.__subclasses__():
        if known.__bases__ == (CastModule, base):
            return cast('type[nn.Module]', known)
    words: dict[str, Any] = {'__module__': base.__module__, '__qualname__': base.__qualname__, '__doc__': base.__doc__}
    if base.__call__ is not nn.Module.__call__:
        # what it does around the call of torch is inside of the casts
        words |= {'__call__': CastModule._call_own, '_call_impl': base._call_impl}
    for name in ENTRY_METHODS:
        # properties, static and class methods have no instance to ask
        method = next((vars(each)[name] for each in base.__mro__ if name in vars(each)), None)
        if isinstance(method, FunctionType):
            words[name] = _entry(method, name in FP32_METHODS)
    try:
        return cast('type[nn.Module]', type(base)(base.__name__, (CastModule, base), words))
    except Exception as error:
        raise AmpAttachError(
            f'{base.__name__} cannot be cast: that takes a class derived from it, which cannot be made '
            f'({type(error).__name__}: {error}).'
        ) from error


def _entry(method: Callable[..., Any], in_fp32: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        rule = self._amp
        if rule is None or not (rule.entry or region.is_open()):
            return method(self, *args, **kwargs)
        if region.is_open():
            if in_fp32:
                return functions.call_in_fp32(functions.METHOD_OP, method, (self, *args), kwargs, 1)
            return method(self, *args, **kwargs)
        region.reach()
        with region.spare(rule.entry), region.operands(rule.entry):
            return entry(self, *args, **kwargs)

    never_compiled(entry)
    return entry


def base_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module without its casts."""
    return cls.__bases__[1] if CastModule in cls.__bases__ else cls


def _copies_itself(module: nn.Module) -> bool:
    """Whether the class of a module has a way of its own to be copied or pickled. It is plain while it is copied."""
    base = base_of(type(module))
    ways = ('__deepcopy__', '__reduce__', '__reduce_ex__', '__getstate__', '__getnewargs_ex__', '__getnewargs__')
    return any(getattr(base, way, None) is not getattr(nn.Module, way, None) for way in ways)


def _rebuild(base: type[nn.Module]) -> nn.Module:
    cls = class_for(base)
    return cls.__new__(cls)


def _cast_again(make: Callable[..., nn.Module], words: tuple[Any, ...], rule: Rule | None) -> nn.Module:
    module = make(*words)
    put(module, rule or Rule())
    _install(module)
    return module


def _install(module: nn.Module) -> None:
    """Let act, also in another process, what acts in the calls of an attached model."""
    rule = rule_of(module)
    if rule is not None and rule.is_model:
        functions.install()
        recompute.install()
        for op in rule.fp32_ops:
            functions.add(op, module)


def put(module: nn.Module, rule: Rule) -> None:
    """Let calls of a module follow a rule, in the place of any other."""
    if not isinstance(module, CastModule):
        module.__class__ = class_for(type(module))
        compiled = vars(module).get('_compiled_call_impl')
        if compiled is not None:
            # by module.compile(), of the call that the class had
            vars(module)['_compiled_call_impl'] = functools.partial(_call_compiled, ref(module), compiled)  # type: ignore[arg-type]
    vars(module)['_amp'] = rule


def _call_compiled(module: ReferenceType[CastModule], call: Any, *args: Any, **kwargs: Any) -> Any:
    found = module()
    return (
        call(*args, **kwargs)
        if found is None or not isinstance(found, CastModule)
        else _by_rule(found, call, args, kwargs)
    )


def take_off(module: nn.Module) -> None:
    """Let calls of a module do what they did."""
    if isinstance(module, CastModule):
        if not module._amp_watchers:
            module.__class__ = base_of(type(module))  # type: ignore[assignment]
        for name in ('_amp', '_amp_attached', '_amp_trained', '_amp_follower', '_amp_first'):
            vars(module).pop(name, None)


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a module; None where it is not cast."""
    return module._amp if isinstance(module, CastModule) else None


def is_cast(model: nn.Module) -> bool:
    """Whether any module of a model has a rule."""
    return any(rule_of(module) is not None for module in model.modules())


def holds_casts(model: nn.Module) -> bool:
    """Whether a model, or a part of it, has 16-bit weights of a level. Rules of O0, O1 and O4 are replaced by others."""
    return any(rule is not None and rule.casts for rule in map(rule_of, model.modules()))


def autocast_forward(model: nn.Module, dtype: torch.dtype, outputs: torch.dtype, enter: EnterObject | None) -> None:
    """Put autocast around every forward of an attached model whose weights are FP32.

    Args:
        model: Has a rule.
        dtype: The 16-bit type.
        outputs: The type of floating outputs.
        enter: Casts tensors inside outputs of a framework's own kind.
    """
    changes = dict(sets_autocast=True, autocast=dtype, outputs=outputs, only_eval=False, enter=enter)
    put(model, dataclasses.replace(rule_of(model) or Rule(), **changes))  # type: ignore[arg-type]
