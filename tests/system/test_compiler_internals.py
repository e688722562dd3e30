"""What the package uses of ``torch.compile``, each name tried on the version that runs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.overrides import TorchFunctionMode
from tried_names import public_names, tried_names

from amp_wrapper import compiler_internals, graph_internals


def frame_compiler() -> object:
    """What compiles the frames of this thread; None where nothing does."""
    found = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    if torch.__version__.startswith('2.6.'):
        # a reference that is not ours to drop
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    return found


def test_untraced_functions_keep_the_count_of_references() -> None:
    """torch 2.6 has a question that drops a reference to its answer, which is None outside of torch.compile."""
    if sys.version_info >= (3, 12):
        pytest.skip('None has no count of references in this version of Python')

    @compiler_internals.untraced
    def nothing() -> None:
        return None

    nothing()
    before = sys.getrefcount(None)
    for _ in range(2000):
        nothing()
    assert abs(sys.getrefcount(None) - before) < 500


def test_each_name_is_tried_here() -> None:
    """Whatever the two modules have, this file calls or compares."""
    names = public_names(compiler_internals) | public_names(graph_internals)
    assert len(names) > 15
    assert names <= tried_names(__file__)


class Watched:
    """Methods that are not traced, and what they see: whether they are, and whether what they call is compiled."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, object]] = []

    @compiler_internals.untraced
    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        return self.look(x)

    @compiler_internals.untraced
    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.look(x)

    def look(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((torch.compiler.is_compiling(), frame_compiler()))
        return x * 2


def test_untraced_functions_break_the_graph() -> None:
    watched, graphs = Watched(), []
    assert Watched.first.__name__ == 'first' and Watched.first.__doc__ == 'Doubles.'

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append([node.name for node in module.graph.nodes if node.op == 'call_function'])
        return module.forward

    def step(x: torch.Tensor) -> torch.Tensor:
        return watched.second(watched.first(x + 1) - 1) + 1

    x = torch.ones(2)
    assert step(x).tolist() == [7, 7]
    compiled = torch.compile(step, backend=backend)
    assert [compiled(x).tolist() for _ in range(2)] == [[7, 7]] * 2
    # nothing of theirs, and nothing twice
    assert [len(names) for names in graphs] == [1, 1, 1]
    assert watched.seen == [(False, None)] * 6
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r'disable|skip'):
        torch.compile(step, backend=backend, fullgraph=True)(x)


def run_in_a_skipped_frame(decorate: Callable[[Any], Any]) -> tuple[int, int]:
    """Call decorated functions where others would be compiled; frames and graphs of the compiler."""
    seen: list[tuple[bool, object]] = []
    graphs: list[object] = []

    def made() -> Callable[[torch.Tensor], torch.Tensor]:
        @decorate
        def double(x: torch.Tensor) -> torch.Tensor:
            return look(x)

        return double

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.compiler.is_compiling(), frame_compiler()))
        return x * 2

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(module)
        return module.forward

    def other(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    many = [made() for _ in range(20)]

    @torch._dynamo.disable(recursive=False)
    def skipped(x: torch.Tensor) -> torch.Tensor:
        assert frame_compiler() is not None
        for function in many:
            x = function(x) / 2
        return other(x)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.compile(lambda x: skipped(x), backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert seen == [(False, None)] * 20
    return torch._dynamo.utils.counters['frames']['total'], len(graphs)


def test_untraced_functions_are_not_compiled_where_others_would_be() -> None:
    """A frame that is skipped calls them: nobody has looked at them yet, and what it calls is compiled."""
    frames, graphs = run_in_a_skipped_frame(compiler_internals.untraced)
    assert graphs == 1
    assert (frames, graphs) == run_in_a_skipped_frame(torch.compiler.disable)


def test_constants_of_traced_functions() -> None:
    calls: list[str] = []

    @compiler_internals.constant_when_traced
    def constant(name: str) -> bool:
        calls.append(name)
        return name in frozenset({'cpu'})

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if constant('cpu') else x - 1

    compiled = torch.compile(step, backend='eager', fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [2, 2]
    assert calls == ['cpu']


def test_constants_when_compiled() -> None:
    """What torch.compile could not trace in one graph: a function of ctypes."""
    asked: list[str] = []

    @compiler_internals.constant_when_traced
    def is_known(name: str) -> bool:
        asked.append(str(ctypes.c_char_p(name.encode()).value))
        return name == 'cpu'

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if is_known('cpu') else x

    x = torch.ones(2)
    assert torch.equal(torch.compile(double, backend='eager', fullgraph=True)(x), x * 2)
    assert asked
    without: list[str] = []

    def untold(name: str) -> bool:
        without.append(str(ctypes.c_char_p(name.encode()).value))
        return name == 'cpu'

    with pytest.raises(Exception, match=r'ctypes|Unsupported|graph break'):
        torch.compile(lambda y: y * 2 if untold('cpu') else y, backend='eager', fullgraph=True)(x)


def test_modules_that_are_compiled() -> None:
    plain = nn.Linear(1, 1)
    wrapper = torch.compile(plain)
    assert compiler_internals.is_compile_wrapper(wrapper) and compiler_internals.compiled_module(wrapper) is plain
    assert not compiler_internals.is_compile_wrapper(plain)


def test_the_compiler_is_not_loaded_by_the_package() -> None:
    # mmengine loads it with some versions of torch
    code = (
        'import sys, mmengine.optim; there = "torch._dynamo" in sys.modules; '
        'from amp_wrapper import compiler_internals as names; '
        'print(names.is_loaded() == there, names.compile_counts().graphs)'
    )
    found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-2:] == ['True', '0']
    assert compiler_internals.is_loaded()


def test_functions_with_another_form_in_a_graph() -> None:
    """One runs between graphs, and never as a graph of its own; the other is traced with its caller."""
    seen: list[object] = []

    def in_graph(x: torch.Tensor) -> torch.Tensor:
        return x + 10

    @compiler_internals.traced_as(in_graph)
    def eager(x: torch.Tensor) -> torch.Tensor:
        seen.append(frame_compiler())
        return x + 1

    x = torch.zeros(1)
    assert eager(x).item() == 1 and seen == [None]
    assert torch.compile(lambda x: eager(x) * 1, backend='eager', fullgraph=True)(x).item() == 10
    assert seen == [None]

    @torch._dynamo.disable(recursive=False)
    def skipped(x: torch.Tensor) -> torch.Tensor:
        return eager(x)

    assert torch.compile(lambda x: skipped(x) * 1, backend='eager')(x).item() == 1
    assert seen == [None, None]


def test_functions_that_are_never_compiled() -> None:
    """By themselves: what they call is, unless that is left out as well."""
    graphs: list[object] = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(module)
        return module.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    def whole(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    compiler_internals.never_compiled(outer)
    compiler_internals.never_compiled(whole, with_callees=True)
    with_callees = not torch.__version__.startswith('2.6.')
    for function, expected in ((outer, 1), (whole, 0 if with_callees else 1)):
        torch._dynamo.reset()
        graphs.clear()

        @torch._dynamo.disable(recursive=False)
        def skipped(x: torch.Tensor, function: Callable[..., Any] = function) -> torch.Tensor:
            return function(x)

        assert torch.compile(lambda x, call=skipped: call(x), backend=backend)(torch.ones(1)).item() == 3
        assert len(graphs) == expected
        torch._dynamo.reset()
        # and inside of a graph it is part of it
        compiled = torch.compile(lambda x, function=function: function(x), backend=backend, fullgraph=True)
        assert compiled(torch.ones(1)).item() == 3


def test_calls_of_what_is_compiled() -> None:
    heard: list[int] = []

    def listen() -> None:
        heard.append(len(heard))

    compiler_internals.before_compiled_calls(listen)
    try:
        first = torch.compile(lambda x: x + 1, backend='eager')
        second = torch.compile(nn.Linear(1, 1), backend='eager')
        x = torch.ones(1, 1)
        for number, call in enumerate((first, first, second)):
            call(x)
            assert len(heard) == number + 1
        x + 1
        assert len(heard) == 3
    finally:
        compiler_internals._listeners.remove(listen)


def test_who_is_called_by_compiled_code() -> None:
    answers: list[bool] = []

    @compiler_internals.untraced
    def ask(x: torch.Tensor) -> torch.Tensor:
        answers.append(compiler_internals.is_called_by_compiled_code())
        return x

    x = torch.ones(1)
    ask(x)
    torch.compile(lambda x: ask(x + 1) + 1, backend='eager')(x)
    ask(x)
    # before 2.13 nobody can tell
    assert answers == [False, torch.__version__ >= (2, 13), False]
    assert compiler_internals.may_be_called_by_compiled_code() in (True, False)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


def test_function_modes() -> None:
    """The stack, eager and in a graph."""
    mode = Doubles()

    def run(x: torch.Tensor) -> torch.Tensor:
        compiler_internals.push_function_mode(mode)
        y = torch.sin(x)
        compiler_internals.pop_function_mode()
        return y

    x = torch.ones(2)
    before = compiler_internals.function_modes()
    compiler_internals.push_function_mode(mode)
    assert compiler_internals.function_mode_at(compiler_internals.function_modes() - 1) is mode
    assert compiler_internals.pop_function_mode() is mode
    for call in (run, torch.compile(run, backend='aot_eager', fullgraph=True)):
        assert torch.equal(call(x), 2 * torch.sin(x))
        assert compiler_internals.function_modes() == before
    assert not compiler_internals.is_default_device(mode)
    with torch.device('cpu') as place:
        assert place is not None
        top = compiler_internals.function_mode_at(compiler_internals.function_modes() - 1)
        assert compiler_internals.is_default_device(top)


def test_the_context_of_a_graph() -> None:
    found: list[object] = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        found.append(graph_internals.tracing_context())
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert found[0] is not None and graph_internals.tracing_context() is None


@torch.library.custom_op('amp_wrapper_tests::double_', mutates_args=('x',))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


blocks: list[bool] = []


@compiler_internals.untraced
def note(is_traced: bool) -> None:
    blocks.append(is_traced)


# torch 2.15 traces a block that calls nothing that is untraced
@compiler_internals.eager_block
@contextmanager
def block() -> Iterator[None]:
    note(torch.compiler.is_compiling())
    yield
    note(torch.compiler.is_compiling())


def test_blocks_that_begin_eagerly() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with block():
            x = x * 2
        return x + 1

    blocks.clear()
    assert torch.compile(run, backend='eager')(torch.ones(1)).item() == 3
    assert blocks == [False, False]


def test_counts() -> None:
    torch.compiler.reset()
    before = compiler_internals.compile_counts()
    assert isinstance(before, compiler_internals.CompileCounts)
    compiled = torch.compile(lambda x, flag: (x * 2 if flag else x * 3).sum().item(), backend='eager')
    for flag in (True, True, False):
        compiled(torch.ones(2), flag)
    now = compiler_internals.compile_counts()
    assert now.graphs - before.graphs >= 2
    assert now.recompilations - before.recompilations >= 1
    assert sum(now.breaks.values()) > sum(before.breaks.values())
    assert compiler_internals.forget_graphs()
    assert compiler_internals.compile_counts().recompilations == 0


def test_the_tables_are_those_of_the_originals() -> None:
    compiler_internals.load_compiler_tables()
    assert torch._dynamo.trace_rules.lookup(nn.functional.cross_entropy) is not None


def test_what_cannot_be_compiled() -> None:
    weight = torch.ones(1)
    assert compiler_internals.compile_problem({}, weight) is None
    assert compiler_internals.compile_problem(dict(backend='eager'), weight) is None
    assert 'there is no backend' in str(compiler_internals.compile_problem(dict(backend='none'), weight))
    assert 'freezing' in str(compiler_internals.compile_problem(dict(options=dict(freezing=True)), weight))


def test_frozen_weights() -> None:
    from torch._inductor import config

    with config.patch(freezing=True):
        assert compiler_internals.FREEZING in str(compiler_internals.compile_problem({}, torch.ones(1)))


def test_names_without_wrappers() -> None:
    model = nn.Sequential(torch.compile(nn.Sequential(torch.compile(nn.Linear(1, 1)))))
    names = [compiler_internals.name_without_wrappers(name) for name, _ in model.named_modules()]
    assert names == ['', '0', '0._orig_mod', '0.0', '0.0._orig_mod']


def test_backward_passes_without_autocast() -> None:
    names = torch._functorch.config
    if not hasattr(names, 'backward_pass_autocast'):
        pytest.skip('this torch makes the backward pass under the autocast of the forward pass')
    before = names.backward_pass_autocast
    for is_off in (False, True, True, False, False):
        compiler_internals.backward_without_autocast(is_off)
        assert names.backward_pass_autocast == ('off' if is_off else before)


def test_graphs_that_run_as_they_are() -> None:
    found: list[bool] = []

    @torch.library.custom_op('amp_wrapper_tests::ask', mutates_args=())
    def ask(x: torch.Tensor) -> torch.Tensor:
        found.append(graph_internals.runs_a_graph(sys._getframe()))
        return x.clone()

    ask.register_fake(lambda x: torch.empty_like(x))
    ask(torch.ones(1))
    torch.compile(lambda x: ask(x) + 1, backend='eager')(torch.ones(1))
    assert found == [False, True]


@pytest.mark.parametrize(
    ('body', 'writes'),
    [
        (lambda x: x * 2, False),
        (lambda x: x.clone().mul_(2), False),
        (lambda x: x.mul_(2), True),
        (lambda x: x.view(-1)[:1].add_(1), True),
        (lambda x: torch.relu_(x), True),
        (lambda x: torch.nn.functional.relu(x, inplace=True), True),
        (lambda x: torch.add(x, 1, out=x), True),
        (lambda x: x.__setitem__(0, 1.0), True),
        (lambda x: torch.nn.functional.relu(x, True), 'counted'),
        (lambda x: torch._foreach_mul_([x], 2.0), True),
        (lambda x: x.swapdims(0, 0).tensor_split(2)[0].mul_(2), True),
        (lambda x: torch.ops.aten.mul_.Scalar(x, 2.0), 'counted'),
        (lambda x: torch.ops.amp_wrapper_tests.double_(x), True),
        (lambda x: x.data.mul_(2), True),
        (lambda x: x.detach().mul_(2), True),
    ],
)
@pytest.mark.parametrize('mode', [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_to_what_was_there(body: Callable[[torch.Tensor], Any], writes: bool | str, mode: Any) -> None:
    found: list[bool] = []

    mark = compiler_internals.constant_when_traced(graph_internals.mark_last_tensor)

    @compiler_internals.constant_when_traced
    def look(number: int) -> bool:
        found.append(graph_internals.was_written(number))
        return True

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        number = mark()
        body(y)
        look(number)
        return y * 1

    if mode is torch.inference_mode and torch.__version__.startswith('2.6.') and writes == 'counted':
        pytest.skip('torch 2.6 traces tensors of inference, which do not count what is written to them')
    with mode():
        torch.compile(run, backend='eager', fullgraph=True)(torch.ones(2))
    assert found[-1] is bool(writes)


def test_a_graph_that_is_traced_anew() -> None:
    """From its beginning, on another way; nothing of the first try is left."""
    seen: list[str] = []

    @compiler_internals.constant_when_traced
    def begins() -> bool:
        seen.append('begins')
        return len(seen) > 1

    @compiler_internals.constant_when_traced
    def changes() -> bool:
        if len(seen) == 1:
            graph_internals.trace_anew('a test')
        return True

    def run(x: torch.Tensor) -> torch.Tensor:
        if begins():
            x = x + 10
        changes()
        return x + 1

    assert torch.compile(run, backend='eager', fullgraph=True)(torch.ones(2)).tolist() == [12.0, 12.0]
    assert seen == ['begins', 'begins']


def test_tensors_without_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert graph_internals.is_fake(torch.ones(1))
    assert not graph_internals.is_fake(torch.ones(1)) and not graph_internals.is_fake(torch.ones(1, device='meta'))


def test_eager_blocks() -> None:
    compiled_calls = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        compiled_calls.append(graph)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    assert not graph_internals.keeps_compiled_functions(model[0])
    model[0].forward = torch.compiler.disable(model[0].forward)  # type: ignore[method-assign]
    assert not graph_internals.keeps_compiled_functions(model[0])
    del model[0].forward
    function = torch.compile(lambda x: x + 1, backend=backend)
    assert not compiler_internals.is_eager()
    with compiler_internals.eager(), compiler_internals.eager():
        assert compiler_internals.is_eager()
        assert torch.equal(function(x), x + 1) and not compiled_calls
    assert not compiler_internals.is_eager()
    assert torch.equal(function(x), x + 1) and len(compiled_calls) == 1

    @compiler_internals.untraced
    def between() -> bool:
        with compiler_internals.eager():
            return compiler_internals.is_eager()

    assert torch.compile(lambda: [between()], backend=backend)() == [True]
    model.compile(backend=backend)
    assert callable(vars(model)[graph_internals.COMPILED_CALL])
    assert graph_internals.keeps_compiled_functions(model)
