"""Each private name of torch, tried on the version that runs; and the list of the versions that were tried."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.library import Library
from torch.utils.checkpoint import checkpoint

import amp_wrapper
from amp_wrapper import torch_internals

ROOT = Path(__file__).resolve().parents[2]
#: What compiles the frames of this thread; None where nothing does.
frame_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback


def test_the_versions_that_were_tried() -> None:
    assert torch_internals.TRIED == ('2.6.0', '2.13.0', '2.14.1', '2.15.0')
    # what the package asks for is the oldest, and what its tests run on is one of them
    assert '"torch>=2.6"' in (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
    pinned = re.search(r'^torch==(\S+)', (ROOT / 'requirements' / 'runtime.txt').read_text(encoding='utf-8'), re.M)
    assert pinned is not None
    assert pinned[1] in torch_internals.TRIED


def test_no_other_file_reaches_into_the_bindings() -> None:
    folder = Path(amp_wrapper.__file__).parent
    found = [
        f'{path.name}:{number}'
        for path in folder.rglob('*.py')
        if path.name != 'torch_internals.py'
        for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1)
        # the registry names an object that users call under this name
        if re.search(r'\btorch\._C\.', line)
        and 'Fp32Op(' not in line
        and "'torch._C.'" not in line
        and "'torch._C._nn.'" not in line
    ]
    assert found == []


def test_graph_task_id() -> None:
    assert torch_internals.graph_task_id() == -1
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda gradient: seen.append(torch_internals.graph_task_id()))
        y.backward()
    assert -1 not in seen and len(set(seen)) == 2
    assert torch_internals.graph_task_id() == -1


def test_function_transforms() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.in_function_transform())
        return x * x

    square(torch.ones(2))
    torch.func.vmap(square)(torch.ones(2))
    torch.func.grad(lambda x: square(x).sum())(torch.ones(2))
    torch.jit.trace(square, torch.ones(2), check_trace=False)
    assert seen == [False, True, True, True]


def test_kernels_of_a_key() -> None:
    assert torch_internals.has_kernel('aten::mm', 'AutocastCPU')
    assert not torch_internals.has_kernel('aten::relu', 'AutocastCPU')


def test_keys_below() -> None:
    library = Library('amp_wrapper_internals', 'FRAGMENT')
    library.define('double(Tensor x) -> Tensor')
    library.impl('double', lambda x: x * 2, 'CompositeExplicitAutograd')
    below, calls = torch_internals.keys_below('AutocastCPU'), []
    op = torch.ops.amp_wrapper_internals.double.default

    def kernel(keyset, x):
        calls.append(x.dtype)
        return op.redispatch(keyset & below, x)

    library.impl('double', kernel, 'AutocastCPU', with_keyset=True)
    x = torch.ones(1)
    assert op(x).item() == 2 and calls == []
    with torch.autocast('cpu', torch.bfloat16):
        assert op(x).item() == 2
    assert calls == [torch.float32]


def test_bindings_of_ops() -> None:
    x = torch.ones(2)
    found = torch_internals.variable_function('exp')
    assert found is not None and torch.equal(found(x), x.exp())
    assert torch_internals.variable_function('no_such_op') is None


def test_the_decorator_of_checkpoint() -> None:
    try:
        made = checkpoint(use_reentrant=False)(torch.exp)
    except TypeError:
        assert torch_internals.checkpointed_function() is None
    else:
        assert type(made) is torch_internals.checkpointed_function()
        assert made.function is torch.exp


@pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch has no torch.distributed')
def test_built_in_communication_hooks() -> None:
    assert 'FP16_COMPRESS' in torch_internals.builtin_comm_hooks()


class Watched:
    """Methods that are not traced, and what they see: whether they are, and whether what they call is compiled."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, object]] = []

    @torch_internals.untraced
    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        return self.look(x)

    @torch_internals.untraced
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
    with pytest.raises(Exception, match='disable'):
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
    frames, graphs = run_in_a_skipped_frame(torch_internals.untraced)
    assert graphs == 1
    assert (frames, graphs) == run_in_a_skipped_frame(torch.compiler.disable)


def test_constants_of_traced_functions() -> None:
    calls: list[str] = []

    @torch_internals.constant_when_traced
    def constant(name: str) -> bool:
        calls.append(name)
        return name in frozenset({'cpu'})

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if constant('cpu') else x - 1

    compiled = torch.compile(step, backend='eager', fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [2, 2]
    assert calls == ['cpu']


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_checkpoint_is_still_known_to_the_compiler(backend: str, device: torch.device) -> None:
    """It is recognised by its identity, and its arguments by their names."""
    amp_wrapper.amp.initialize(nn.Linear(1, 1), opt_level='O1', verbosity=0)
    layer = nn.Linear(4, 4).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False).sin()

    x = torch.randn(2, 4, device=device)
    step(x).sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    torch.compile(step, backend=backend, fullgraph=True)(x).sum().backward()
    assert torch.equal(layer.weight.grad, expected)


def test_constants_when_compiled() -> None:
    """What torch.compile could not trace in one graph: a function of ctypes."""
    asked: list[str] = []

    @torch_internals.constant_when_traced
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
