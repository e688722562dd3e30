"""The benchmarks run, and what they count is right."""

from __future__ import annotations

import functools
import gc
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import python
from grid import but_every, long

from amp_wrapper import ops
from amp_wrapper.ops.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]


def test_cost_of_giving_buffers_back() -> None:
    """The page comes whole; what is on it depends on the machine."""
    from benchmarks.buffers import WAYS, report

    text = report(torch.device('cpu'), 1, (2, 3, 32, 32), (1, 1))
    assert text.count('in all, for one step') == len(WAYS)
    # three of each BatchNorm: the stem, two stages of three and a shortcut
    assert '27 buffers of ' in text


def test_cost_of_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page comes whole, and each way does what it is called."""
    from benchmarks import monitoring

    monkeypatch.setattr(monitoring, 'MODELS', {'digits CNN': monitoring.digits})
    text = monitoring.report(torch.device('cpu'), 2, ('O5',))
    assert all(text.count(f'| digits CNN | O5 | {way} |') == 1 for way in monitoring.WAYS)
    loops = {way: monitoring.Loop(monitoring.digits, 'O5', way, torch.device('cpu')) for way in monitoring.WAYS}
    for loop in loops.values():
        loop.step()
    off, measured, armed = (len(loop.parts.observers) for loop in loops.values())
    assert (off, measured, armed) == (0, 1, 1)
    assert [len(loop.rows) for loop in loops.values()] == [0, 1, 0]


def test_calls_and_changes_of_file_are_counted_as_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called from outside of the package, through it, and what is no function of Python."""
    from benchmarks.host_probe import Counts

    package = tmp_path / 'counted'
    package.mkdir()
    (package / '__init__.py').write_text('')
    (package / 'a.py').write_text(
        'from . import b\n\n\ndef one():\n    return max([1], key=lambda x: x) + b.two()\n\n\n'
        'def other():\n    return sum(x for x in (1, 2))\n'
    )
    (package / 'b.py').write_text('def two():\n    return three() + three()\n\n\ndef three():\n    return 1\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    from counted import a  # type: ignore[import-not-found]

    def call() -> None:
        a.one()
        json.dumps([1])
        a.other()

    found = Counts(str(package)).of(call)
    # one, its lambda, two, three, three, other, and its generator, which is entered three times
    assert (found.calls, found.changes) == (9, 3)
    assert sum(found.table.values()) == 9 and sum(n for (file, _), n in found.table.items() if file == 'b.py') == 3
    assert Counts(str(tmp_path / 'count')).of(call).calls == 0


@long
def test_cost_on_the_host(tmp_path: Path) -> None:
    """The page comes whole, for a tree that is named; what is on it depends on the machine, but for the modules."""
    page = tmp_path / 'host.md'
    words = ['--tree', f'here={ROOT}', '--levels', 'O2', '--rounds', '1', '--processes', '1', '--steps', '3']
    done = python('-m', 'benchmarks.host', *words, '--write', page, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    text = page.read_text()
    assert text.count('| functional, `FusedAdamW` | O2 |') == 2
    # torch 2.6 loads more of its own, which the package asks for
    assert '| mmengine hidden | none |' in text or torch.__version__ < (2, 13)
    assert 'nan' not in text
    refused = python('-m', 'benchmarks.host', '--tree', f'x={tmp_path}')
    assert refused.returncode == 2 and 'is not LABEL=PATH' in refused.stderr


@pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed')
def test_bytes_of_the_gradient_exchange(tmp_path: Path) -> None:
    """Two gloo processes: O2 hands half the bytes of O0 to the all-reduce, and BatchNorm stays FP32."""
    report, numbers = tmp_path / 'report.md', tmp_path / 'numbers.json'
    words = ['--quick', '--backend', 'gloo', '--report', str(report), '--json', str(numbers), '--timeout', '150']
    done = python('-m', 'benchmarks.distributed', *words, timeout=180)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(numbers.read_text())
    assert report.read_text().count('\n| small transformer') > 20

    def handed(model: str, variant: str, passes: int) -> dict[str, Any]:
        """Bytes per type; with views of the buckets they are the same."""
        found = [
            one['bytes']
            for one in result['counts']
            if (one['model'], one['variant'], one['passes']) == (model, variant, passes)
        ]
        assert found and all(one == found[0] for one in found)
        return found[0]

    for passes in (1, 4):
        whole = handed('small transformer', 'O0', passes)
        assert list(whole) == ['float32']
        for variant, dtype in (('O2', 'float16'), ('O3', 'float16'), ('O5', 'bfloat16')):
            assert handed('small transformer', variant, passes) == {dtype: whole['float32'] / 2}, variant
        for variant in ('plain DDP', 'stock AMP, float16', 'O1', 'O4'):
            assert handed('small transformer', variant, passes) == whole, variant
        # weight and bias of one BatchNorm of 16 channels
        kept = 2 * 16 * 4
        rest = handed('small CNN', 'O0', passes)['float32'] - kept
        assert handed('small CNN', 'O2', passes) == {'float32': kept, 'float16': rest / 2}
        assert handed('small CNN', 'O5', passes) == {'float32': kept, 'bfloat16': rest / 2}
        assert handed('small CNN', 'O3', passes) == {'float16': (rest + kept) / 2}


def test_lists_of_the_ops_benchmark_are_those_of_the_models() -> None:
    """The numbers that the papers give: 25.6 and 28.3 million parameters."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.ops import lists_of

    counted = {name: (len(shapes), sum(map(math.prod, shapes))) for name, shapes in lists_of(7).items()}
    assert counted['ResNet-50'] == (161, 25_557_032)
    assert counted['Swin-T'] == (173, 28_288_354)
    assert counted['one huge tensor'] == (1, 7)
    assert counted['2,000 tiny tensors'][0] == 2000


def test_ops_benchmark_compares_what_means_the_same() -> None:
    """Every op but those of a whole step has rows, and what is written by a sequence of torch is what the op writes."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.ops import cases, scale_case

    def results(index: int, peer: str | None) -> list[torch.Tensor]:
        case = cases([(3,), (2, 5), (70,)], torch.device('cpu'))[index]
        outcome = case.ours() if peer is None else case.peers[peer]()
        return [t.clone() for t in (*case.written, *([] if case.written else [outcome]))]

    found = cases([(3,)], torch.device('cpu'))
    steps = {'step_prologue', 'fused_adam', 'fused_sgd'}
    assert {case.op for case in found} | {scale_case(torch.device('cpu')).op} == set(SCHEMAS) - steps
    for index, case in enumerate(found):
        wanted = results(index, None)
        for peer in case.peers:
            for ours, theirs in zip(wanted, results(index, peer)):
                torch.testing.assert_close(
                    theirs.float(), ours.float(), rtol=2e-3, atol=1e-6, msg=f'{case.op}, {case.what}, {peer}'
                )


# -- the optimizer step ------------------------------------------------------------------------------------------------


def step_case(optimizer: str = 'AdamW', clip: bool = True, dtype: torch.dtype = torch.float16) -> Any:
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_ways import Case

    return Case(optimizer, clip, dtype, torch.device('cpu'))


def ways_of(case: Any) -> dict[tuple[str, str], Any]:
    from benchmarks.step_ways import ways

    return {(way.group, way.name): way for way in ways(case)}


def test_lists_of_the_step_benchmark_are_those_of_the_models() -> None:
    """The numbers that the papers give; a billion is what the list is for."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_models import MODELS, TITLES, elements, shrunk

    assert {name: elements(make()) for name, make in MODELS.items()} == {
        'tiny': 5_341,
        'resnet50': 25_557_032,
        'swin_t': 28_288_354,
        'vit_b16': 86_567_656,
        'bert_large': 335_141_888,
        'gpt_1b': 1_011_476_480,
    }
    assert set(TITLES) == set(MODELS)
    bert = MODELS['bert_large']()
    small = shrunk(bert, 2**20)
    assert len(small) == len(bert) and 0.9e6 < elements(small) <= 2**20
    assert shrunk(bert, 2**40) == bert


def test_bytes_are_counted_as_by_hand() -> None:
    """100 elements of 4 bytes: what is read, what is written, what is a view."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import step_counting
    from benchmarks.step_counting import counts_of

    # an op that is added has to say whether it reads what it writes
    known = {name.removeprefix('amp_wrapper::') for name in step_counting._WRITTEN_ONLY | step_counting._READ_ONLY}
    lists = {name for name, schema in SCHEMAS.items() if '!)[]' in schema}
    assert lists - known == {'fused_adam', 'fused_sgd'}

    a, b, half = torch.ones(100), torch.ones(100), torch.ones(100, dtype=torch.float16)
    one = torch.ones(())
    cases: list[tuple[Any, int]] = [
        (lambda: a.copy_(half), 200 + 400),
        (lambda: a.add_(b), 400 + 400 + 400),
        (lambda: a.mul(a), 400 + 400),
        (lambda: torch.mul(a, b, out=b), 800 + 400),
        (lambda: a.zero_(), 400),
        (lambda: a.view(10, 10).t()[3:], 0),
        (lambda: torch.empty(100), 0),
        (lambda: one.expand(100).clone(), 4 + 400),
        (lambda: torch._foreach_copy_([a, b], [half, half]), 2 * 400 + 200),
        (lambda: torch._foreach_norm([a, b]), 800 + 8),
    ]
    for index, (call, expected) in enumerate(cases):
        assert counts_of(call).bytes == expected, index

    def adamw(scale: torch.Tensor | None) -> int:
        lists = [[torch.ones(100)] for _ in range(4)]
        words = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
        steps = [torch.ones(())]
        return counts_of(
            lambda: torch._fused_adamw_(*lists, [], steps, **words, grad_scale=scale, found_inf=None)
        ).bytes

    # gradient and step count read; weight and two moments read and written; the gradient written where it is unscaled
    assert adamw(None) == 2800 + 4
    assert adamw(one) == 2800 + 4 + 400 + 4

    rows, decision = torch.zeros(1, 12), torch.zeros(8)
    for weight, partner, of_both in (
        (a, a, 800),  # itself
        (a, half, 800 + 200),  # written
        (half, torch.zeros(100, dtype=torch.int16), 400 + 400),  # a remainder: read and written
    ):
        lists = [[half.clone()], [weight], [torch.zeros(100)], [torch.zeros(100)], [], [partner]]
        counted = counts_of(functools.partial(torch.ops.amp_wrapper.fused_adam, *lists, rows, decision)).bytes
        # the gradient, the moments, rows and decision
        assert counted == 200 + 1600 + 48 + 32 + of_both


def test_host_reads_are_counted() -> None:
    """Whatever form they take; what lies on the host everywhere does not count."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_counting import counts_of

    x, y = torch.ones(3), torch.zeros(())
    for call, expected in (
        (lambda: x[0].item(), 1),
        (lambda: x.tolist(), 1),
        (lambda: bool(y), 1),
        (lambda: float(y) + x.sum().item(), 2),
        (lambda: torch.where(x > 0, x, y), 0),
    ):
        assert counts_of(call).reads == expected
    assert counts_of(lambda: float(y), [y.data_ptr()]).reads == 0


def test_allocations_are_what_the_allocator_says() -> None:
    """Temporaries of an operation too, and nothing that was there before."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_counting import allocations

    kept: list[torch.Tensor] = []
    before = [torch.ones(50_000)]

    def call() -> None:
        temporary = torch.ones(100_000)
        kept.append(temporary[:10] * 2)
        del temporary
        kept.append(torch.ones(20_000))
        before.clear()

    left, peak = allocations(call, torch.device('cpu'))
    assert 80_000 <= left < 81_000
    assert 400_000 <= peak < 402_000


@pytest.fixture
def few_objects() -> Iterator[None]:
    """The collections before each measurement look at what the test made, not at all that was imported."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_ways import noise

    noise(torch.device('cpu'))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def byte_table() -> list[list[str]]:
    lines = (ROOT / 'docs/performance.md').read_text().split('<!-- bytes')[1].splitlines()[3:]
    table = [line.strip('| ').split(' | ') for line in lines[: lines.index('')]]
    assert len(table) == 12
    return table


@pytest.mark.parametrize('line', but_every(3, byte_table()), ids=lambda line: line[0])
def test_bytes_of_the_page_are_those_of_the_ways(line: list[str], few_objects: None) -> None:
    """The table of docs/performance.md, its sums included."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step import started
    from benchmarks.step_counting import counts_of
    from benchmarks.step_ways import Unavailable

    name, moved, parts, resident, peak = line
    assert sum(int(part.split()[-1]) for part in parts.split(', ')) == int(moved)
    if name.startswith('this package') and ops.backend_of('cpu') == 'reference':
        pytest.skip('the reference moves as many bytes as it likes')
    for dtype in (torch.float16, torch.bfloat16):
        case = step_case(dtype=dtype)
        found = [way for (_, title), way in ways_of(case).items() if title == name]
        if not found:
            # bfloat16 has levels of its own
            found = [
                way
                for (_, title), way in ways_of(case).items()
                if title == name.replace('O2', 'O5').replace('O1', 'O4')
            ]
        assert len(found) == 1
        try:
            # enough elements that tables and counters do not show
            step, kept, highest, most = started(found[0], case, [(1024, 64), (512, 128), (1000,)])
        except Unavailable:
            assert dtype is torch.bfloat16 and name.startswith('torch.amp')
            continue
        assert (kept, highest) == pytest.approx((int(resident), int(peak)), abs=0.1)
        assert most >= highest
        step.prepare()
        counts = counts_of(step.run, [tensor.data_ptr() for tensor in step.host_tensors()])
        assert counts.bytes / 132_072 == pytest.approx(int(moved), abs=0.1)
        assert counts.reads == (name == 'torch.amp, foreach')


@pytest.mark.skipif(ops.backend_of('cpu') == 'reference', reason='the reference moves as many bytes as it likes')
@pytest.mark.parametrize(
    'name, moved', [('this package, O2, fused', 22), ('this package, O2, fused, split masters', 20)]
)
def test_bytes_with_sgd_are_those_of_the_page(name: str, moved: int, few_objects: None) -> None:
    """Gradient twice, weight, momentum: 2 + 2 + 8 + 8 + 2, or with a remainder 2 + 2 + 4 + 4 + 8."""
    from benchmarks.step import start
    from benchmarks.step_counting import counts_of

    case = step_case('SGD')
    step = start(ways_of(case)['half', name], case, [(1024, 64), (512, 128), (1000,)])
    assert counts_of(step.run).bytes / 132_072 == pytest.approx(moved, abs=0.1)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('optimizer, clip', [('AdamW', True), ('SGD', False)])
def test_ways_that_are_compared_mean_the_same(optimizer: str, clip: bool, dtype: torch.dtype) -> None:
    """The same moments after two steps, which show what became of the gradients; nothing changes where one is infinite."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_ways import Unavailable

    case = step_case(optimizer, clip, dtype)
    wanted: dict[bool, list[torch.Tensor]] = {}
    seen = 0
    for (group, name), way in ways_of(case).items():
        try:
            step = way.build(case, [(16, 3), (5,), (70,)])
        except Unavailable:
            continue
        for _ in range(2):
            step.prepare()
            step.run()
            step.finish()

        def moments(step: Any = step) -> list[torch.Tensor]:
            states = [step.optimizer.state[p] for p in step.optimizer.param_groups[0]['params']]
            keys = ('exp_avg', 'exp_avg_sq') if optimizer == 'AdamW' else ('momentum_buffer',)
            return [state[key].clone() for state in states for key in keys]

        found = moments()
        # FP32 training has no scale, which would show in the eps beside the norm
        base = wanted.setdefault(group == 'single', found)
        tolerance = 1e-2 if '16-bit moments' in name or dtype is torch.bfloat16 or group != 'half' else 1e-4
        for ours, theirs in zip(base, found):
            assert bool((ours != 0).any())
            torch.testing.assert_close(
                theirs.float(), ours.float(), rtol=tolerance, atol=0, msg=lambda m, name=name: f'{name}: {m}'
            )
        if group != 'single':
            step.prepare()
            first = next(iter(step.model.parameters()))
            assert first.grad is not None
            first.grad.view(-1)[0] = torch.inf
            weights = [p.detach().clone() for p in step.model.parameters()]
            step.run()
            assert all(map(torch.equal, found, moments())), name
            assert all(map(torch.equal, weights, step.model.parameters())), name
        seen += 1
    assert seen >= 10


def test_step_benchmark_prints_every_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the tiny list: every way has its row or its reason, and the page has every column."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import step

    monkeypatch.setattr(torch, 'set_num_threads', lambda count: None)
    printed: list[str] = []
    path = tmp_path / 'page.md'
    words = ['--models', 'tiny', '--optimizers', 'AdamW', '--clip', 'on', '--threads', '1', '--rounds', '2']
    step.main([*words, '--write', str(path)], printed.append)
    text = path.read_text()
    assert printed == [text]
    assert (tmp_path / 'page.svg').read_text().count('torch ops, folded') == 2 and '(page.svg)' in text
    columns = (
        'ms | best ms | to fused | B/param | of copy | operations | host us | reads | resident B/param | peak B/param'
    )
    for title in ('16-bit weights, FP32 masters', 'FP32 weights, scaled gradients', 'FP32 training'):
        assert f'| {title}: way | {columns} |' in text
    for (_, name), _ in ways_of(step_case()).items():
        assert f'\n| {name} | ' in text or f'\n- {name} (' in text, name
    row = next(line for line in text.splitlines() if line.startswith('| torch ops, unscale |'))
    cells = row.strip('| ').split(' | ')
    assert len(cells) == 11 and cells[4] == '60.1' and cells[8:] == ['0', '20.0', '20.0']
    assert "- mmengine's AmpOptimWrapper, fused (FP32 weights, scaled gradients): " in text
    # it is not what the targets are about
    assert 'None of the targets could be measured' in text


def test_targets_are_measured_against_the_fastest_peer() -> None:
    """Round by round, beside the first row; FP32 without clipping, which both would do alike."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_page import Block, Row, targets

    def lines(clip: bool, seconds: dict[tuple[str, str], list[float]]) -> list[str]:
        case = step_case(clip=clip)
        rows = [Row(way, times=seconds.get(key, [])) for key, way in ways_of(case).items()]
        return targets([Block('resnet50', case, 2, rows)])[2:]

    seconds = {
        ('half', 'this package, O2, fused'): [1.0, 2.0, 1.0],
        ('half', 'torch ops, unscale'): [4.0, 8.0, 4.0],
        ('half', 'torch ops, folded'): [2.4, 4.8, 9.0],
        ('single', 'this package, optimizer alone'): [1.0],
        ('single', 'torch fused'): [0.9],
    }
    where = 'ResNet-50, AdamW, {}, float16, 2 threads'
    assert lines(True, seconds) == [
        f'| at least 2.5 times as fast as the fastest torch ops | {where.format("clip")} | '
        '2.40 (unscale 4.00, folded 2.40) | missed |'
    ]
    assert lines(False, seconds) == [
        f"| FP32: not slower than torch's fused optimizer | {where.format('no clip')} | 0.90 | missed |"
    ]
    seconds['half', 'torch ops, folded'] = [2.6, 5.2, 2.6]
    assert lines(True, seconds)[0].endswith('2.60 (unscale 4.00, folded 2.60) | met |')


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch, few_objects: None) -> None:
    """With a reason that has the numbers; what fits alone is built anew for each round."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import step

    monkeypatch.setattr(torch, 'set_num_threads', lambda count: None)
    chosen = [('single', 'torch fused'), ('single', 'torch foreach'), ('half', 'torch ops, unscale')]
    case = step_case()
    monkeypatch.setattr(step, 'ways', lambda _: [ways_of(case)[key] for key in chosen])
    # 5,341 elements: 16 bytes each fit into six tenths of this, 20 do not
    monkeypatch.setattr(step, 'free_bytes', lambda _: 5341 * 30)
    block = step.measure('tiny', case, 1, 4)
    assert not block.rows[0].reason, (block.rows[0].reason, block.rows[0].estimate)
    assert [len(row.times) for row in block.rows] == [2, 0, 0] and not block.kept
    assert block.rows[1].reason == 'needs 0.0 GB and room to build them, and 0.0 GB are free'


def test_step_benchmark_refuses_what_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks import step

    with pytest.raises(SystemExit):
        step.main(['--end-to-end'])
    assert '--end-to-end needs a GPU' in capsys.readouterr().err


def test_whole_training_steps_run() -> None:
    """What a GPU measures, on a model that a CPU can train; mmengine's stock wrapper says why it does not."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_training import VARIANTS, Training, Transformer, report, resnet

    trainings = (
        Training('small ResNet', lambda: resnet(4, (1,)), (2, 3, 8, 8), 'SGD'),
        Training('small transformer', lambda: Transformer(64, 1), (2, 4, 64), 'AdamW'),
    )
    text = report(torch.device('cpu'), 1, 'a test', trainings)
    for training in trainings:
        for variant in VARIANTS:
            assert f'\n| {training.name} | {variant} | ' in text or f'\n- {training.name}, {variant}: ' in text
    assert '| small transformer | O2 | FusedAdamW |' in text
