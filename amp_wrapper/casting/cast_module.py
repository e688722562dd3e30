"""What a cast does to a module: its class becomes one that casts around each call, as ``fully_shard`` makes one that gathers.

A class, and no hooks: torch calls a module with hooks in a slower way, does not look at hooks before it takes a compiled graph,
and closes nothing of theirs after an interrupt.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast
from weakref import ReferenceType, WeakSet, ref

from torch import Tensor, nn

from ..compiler_internals import never_compiled
from ..errors import AmpAttachError, ScriptingError
from ..policy.fp32_registry import FP32_METHODS
from ..policy.levels import Policy
from ..policy.nested import HALF_TYPES
from . import calls, checks, fp32_values, functions, region, state_dicts
from .modules import own_tensors
from .rule import Link, Rule, rule_of

#: Methods by which users and frameworks enter a model or a part of it without calling it: a region is opened there too.
ENTRY_METHODS: tuple[str, ...] = ('loss', 'predict', 'extract_feat', 'inference', *FP32_METHODS)


class CastModule(nn.Module):
    """Stands before the class of a module that is cast."""

    _amp_wrapper_rule: Rule | None = None
    _amp_wrapper_link = Link()

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the class that casts from those who ask to be told of subclasses of a module's class."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module by its rule. Who kept ``module.__call__`` comes here as well, such as wrappers of torch.compile."""
        # torch.compile fails over super() inside of blocks
        own: Any = super()._call_impl
        return calls.call(self, own, args, kwargs)

    def _call_own(self, *args: Any, **kwargs: Any) -> Any:
        """As ``_call_impl``, where the class of the module has a ``__call__`` of its own."""
        return calls.call(self, super().__call__, args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuses half(), float(), to(dtype) and their like, and moves masters with their weights."""
        for module in self.modules():
            # before anything is changed
            if isinstance(module, CastModule) and module._amp_wrapper_rule and module._amp_wrapper_link.is_attached:
                checks.refuse_conversion(module, fn, module._amp_wrapper_rule.policy.opt_level)
        fp32_values.agree(self.parameters(recurse=False))
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in self.parameters(recurse=False):
            fp32_values.follow_device(weight)
        return result

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Lets loaded values reach the masters unrounded."""
        load = functools.partial(super()._load_from_state_dict, state_dict, prefix, *args, **kwargs)
        listener = self._amp_wrapper_link.listener
        if listener is not None:
            listener.before_load()
        if self._amp_wrapper_rule is None or not self._amp_wrapper_rule.casts:
            load()
        else:
            state_dicts.load(self, load, state_dict, prefix)
        if listener is not None and self._buffers:
            listener.after_load(self, [key for key in self._buffers if prefix + key in state_dict])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What makes the module again: as its own class says, and then the casts."""
        base = base_of(type(self))
        if self._amp_wrapper_link.listener is not None:
            self._amp_wrapper_link.listener.synchronise()
        with _plain(self, '__reduce__', '__reduce_ex__', '__getstate__', '__getnewargs_ex__', '__getnewargs__'):
            own: Any = super() if isinstance(self, CastModule) else self
            make, words, *rest = own.__reduce_ex__(max(protocol, 2))
        words = tuple(base if word is type(self) else word for word in words)
        return _cast_again, (make, words, self._amp_wrapper_rule), *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        memo[id(self._amp_wrapper_rule)] = self._amp_wrapper_rule
        if hasattr(super(), '__deepcopy__'):
            with _plain(self, '__deepcopy__'):
                own: Any = super() if isinstance(self, CastModule) else self
                copied: nn.Module = own.__deepcopy__(memo)
            if self._amp_wrapper_rule is not None:
                put(copied, self._amp_wrapper_rule)
        else:
            make, words, *rest = self.__reduce_ex__(4)
            copied = memo[id(self)] = make(*copy.deepcopy(words, memo))
            if rest:
                copied.__setstate__(copy.deepcopy(rest[0], memo))  # type: ignore[no-untyped-call]
        if self._amp_wrapper_link.trains:
            take_off(copied)
            theirs = dict(own_tensors(self))
            for name, mine in own_tensors(copied):
                if mine.dtype in HALF_TYPES:
                    # a class that copies itself may leave something out, or make it anew
                    exact = fp32_values.in_fp32(theirs.get(name, mine)).detach()
                    mine.data, mine.grad = exact.clone() if exact.shape == mine.shape else mine.float(), None
        return copied

    def __prepare_scriptable__(self) -> Any:
        raise ScriptingError(
            'torch.jit.script cannot compile the casts of a model that mixed precision is attached to. Write '
            'torch.jit.trace(model, example), which records them, or load model.state_dict() into a new FP32 model and script '
            'that one.'
        )


class Watcher:
    """Is told of the calls of a module, outside of its casts: what it is given, and what its caller gets. Not in graphs.

    Args:
        enter: Called with the module, ``args`` and ``kwargs`` before a call.
        leave: Called with the module and the output; None after an exception.
    """

    def __init__(
        self, enter: Callable[[nn.Module, Any, Any], object], leave: Callable[[nn.Module, Any], object]
    ) -> None:
        self.enter, self.leave = enter, leave
        # a module holds this, and must not wait for the garbage collector
        self._modules: WeakSet[nn.Module] = WeakSet()

    def watch(self, module: nn.Module) -> Watcher:
        """Be told of calls of a module from now on; no ScriptModule."""
        link = link_of(module)
        link.watchers = (*link.watchers, self)
        self._modules.add(module)
        return self

    def remove(self) -> None:
        """Be told no longer."""
        for module in self._modules:
            link = link_of(module)
            link.watchers = tuple(each for each in link.watchers if each is not self)
            if rule_of(module) is None:
                take_off(module)
        self._modules.clear()


def class_for(base: Any) -> type[nn.Module]:
    """The class that casts for the class of a module.

    Raises:
        AmpAttachError: No class can be derived from it.
    """
    if issubclass(base, CastModule):
        # of what was cast, by parametrizations for example
        return cast('type[nn.Module]', base)
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
        rule = self._amp_wrapper_rule
        if rule is not None and in_fp32 and region.is_open():
            return functions.call_in_fp32(functions.METHOD_OP, method, (self, *args), kwargs)
        if rule is None or not rule.entry or region.is_open():
            return method(self, *args, **kwargs)
        if rule.outermost or rule.opens == region.TABLES:
            # as a call of the module
            return calls.by_rule(self, functools.partial(entry, self), args, kwargs)
        if self._amp_wrapper_link.listener is not None:
            self._amp_wrapper_link.listener.before_call()
        with region.spare(rule.entry), region.operands(rule.entry):
            return entry(self, *args, **kwargs)

    never_compiled(entry)
    return entry


def base_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module without its casts."""
    return cls.__bases__[1] if CastModule in cls.__bases__ else cls


@contextmanager
def _plain(module: nn.Module, *ways: str) -> Iterator[None]:
    """Inside, a module is of its own class, if that has one of these ways to be copied or pickled."""
    cls = type(module)
    base: Any = base_of(cls)
    if any(getattr(base, way, None) is not getattr(nn.Module, way, None) for way in ways):
        _set_class(module, base)
    try:
        yield
    finally:
        _set_class(module, cls)


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    # a module may have its own way to set attributes
    object.__setattr__(module, '__class__', cls)


def _cast_again(make: Callable[..., nn.Module], words: tuple[Any, ...], rule: Rule | None) -> nn.Module:
    """Make a module from a pickle or for a copy, also in another process, where what acts in its calls has to act first."""
    module = make(*words)
    if rule is not None:
        put(module, rule)
        if rule.is_model:
            install(rule.policy)
    return module


def install(policy: Policy) -> None:
    """Let act in regions the registry, and what a configuration names, as long as a module is cast by it."""
    functions.install()
    region.install()
    for op in policy.fp32_ops:
        functions.add(op, policy)


def link_of(module: nn.Module) -> Link:
    """What ties a module to those who attached or watch it. From now on its class is one that casts."""
    if not isinstance(module, CastModule):
        _set_class(module, class_for(type(module)))
        compiled = vars(module).get('_compiled_call_impl')
        if compiled is not None:
            # by module.compile(), of the call that the class had
            vars(module)['_compiled_call_impl'] = functools.partial(_call_compiled, ref(module), compiled)  # type: ignore[arg-type]
    link: Link = vars(module).setdefault('_amp_wrapper_link', Link())
    return link


def put(module: nn.Module, rule: Rule) -> Link:
    """Let calls of a module follow a rule, in the place of any other."""
    vars(module)['_amp_wrapper_rule'] = rule
    return link_of(module)


def _call_compiled(module: ReferenceType[CastModule], call: Any, *args: Any, **kwargs: Any) -> Any:
    found = module()
    return calls.by_rule(found, call, args, kwargs) if isinstance(found, CastModule) else call(*args, **kwargs)


def take_off(module: nn.Module) -> None:
    """Let calls of a module do what they did. Who watches them goes on."""
    if isinstance(module, CastModule):
        watchers = module._amp_wrapper_link.watchers
        for name in ('_amp_wrapper_rule', '_amp_wrapper_link'):
            vars(module).pop(name, None)
        if watchers:
            link_of(module).watchers = watchers
        else:
            _set_class(module, base_of(type(module)))
            compiled = vars(module).get('_compiled_call_impl')
            if compiled is not None and getattr(compiled, 'func', None) is not _call_compiled:
                # by module.compile(), of the call with casts
                module._compiled_call_impl = None


def copies_are_fp32(models: Iterable[nn.Module]) -> None:
    """From now on, deep copies of cast models are plain FP32 models: with the values of the masters, where there are any."""
    for module in (each for model in models for each in model.modules() if rule_of(each) is not None):
        link_of(module).trains = True


def is_cast(model: nn.Module) -> bool:
    """Whether any module of a model has a rule."""
    return any(rule_of(module) is not None for module in model.modules())


def holds_casts(model: nn.Module) -> bool:
    """Whether a model, or a part of it, has 16-bit weights of a level. Rules of O0, O1 and O4 are replaced by others."""
    return any(rule is not None and rule.casts for rule in map(rule_of, model.modules()))
