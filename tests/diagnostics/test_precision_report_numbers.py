"""Ranges, rounding and memory in the precision report against numbers that were worked out by hand; and how it is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

from amp_wrapper import amp
from amp_wrapper.diagnostics import report_table
from amp_wrapper.diagnostics.level_trial import Subject, measured_peak
from amp_wrapper.diagnostics.precision_report import PrecisionReport, _lost_at_best, best_scale
from amp_wrapper.diagnostics.ranges import measure_one
from amp_wrapper.diagnostics.rounding import Gathering, Rounding
from amp_wrapper.policy import resolve


def linear(*rows: list[float]) -> nn.Linear:
    """A layer with these weights and without a bias."""
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    return layer


def module(report: PrecisionReport, name: str = '') -> dict[str, Any]:
    return next(module for module in report.data['modules'] if module['name'] == name)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


@pytest.fixture(scope='module')
def report() -> PrecisionReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), torch.zeros(6, 3))

    return amp.report(model, torch.randn(6, 4), 'O2', loss, make_optimizer=adam)


def test_a_tensor_that_several_modules_hand_on_counts_once_in_the_sums() -> None:
    """The rows of the modules have it each."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * 2.0**-4).sum()

    class Changing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            # other numbers in the same memory
            return super().forward(x).mul_(2)

    def measured(model: nn.Module) -> dict[str, Any]:
        return amp.report(model, torch.tensor([[1.0]]), 'O2', loss).data

    layer = linear([4.0])
    alone, inside = measured(layer), measured(nn.Sequential(nn.Sequential(nn.Identity(), layer), nn.Identity()))
    assert alone['gradients']['outputs']['powers'] == {'-4': 1}
    # the input, which the first module hands on, takes no gradient
    assert inside['gradients'] == alone['gradients']
    assert inside['outputs']['powers'] == {'0': 1, '2': 1}
    assert report_table.for_page(inside)['powers']['Outputs of modules'] == {0: 1, 2: 1}
    rows = {each['name']: each['ranges'] for each in inside['modules']}
    assert [rows[name]['output_gradients']['elements'] for name in ('', '0', '0.1', '1')] == [1] * 4
    changed = measured(Changing(layer))
    assert changed['outputs']['powers'] == {'2': 1, '3': 1}
    assert changed['gradients']['outputs']['elements'] == 2


def test_memory_that_is_used_again_holds_other_numbers() -> None:
    total = Gathering(rounds=False)
    for power in range(5):
        Gathering(rounds=False).add([torch.full((3,), 2.0**power)], total)
    found = total.read()
    assert found is not None
    assert found.ranges.powers() == dict.fromkeys(range(5), 3)


def test_float64_numbers_beside_powers_of_two_are_counted_where_they_are() -> None:
    """Rounded to float32, they would reach the next power, or become zero."""
    values = torch.tensor(
        [2.0**-14 * (1 - 2.0**-40), 2.0**-25 * (1 + 2.0**-40), 2.0**-160, 2.0**13], dtype=torch.float64
    )
    gathered = Gathering(scale=1.0)
    gathered.add([values])
    found = gathered.read()
    assert found is not None
    assert found.ranges.powers() == {-15: 1, -25: 1, -127: 1, 13: 1}
    assert found.ranges.zeros == 0
    assert [found.at_most(power) for power in (-126, -25, -24, -14)] == [1, 1, 2, 3]
    assert best_scale(found.ranges, torch.float16) == 1.0
    assert _lost_at_best(found, 1.0) == {'overflow': 0, 'underflow': 1 / 4, 'subnormal': 2 / 4}


# -- ranges ------------------------------------------------------------------------------------------------------------


def test_shares_of_weights_that_16_bit_types_lose() -> None:
    # too large for float16; zero in it; subnormal; rounded by 2 ** -12 / (1 + 2 ** -12); exact in both
    rows = [[1e5, 1e-9, 3 * 2.0**-24, 1 + 2.0**-12], [1.0, 0.0, -2.0, 0.5]]
    found = module(amp.report(linear(*rows), torch.ones(1, 4), 'O5'))['ranges']['weights']
    assert (found['elements'], found['zeros'], found['nonfinite']) == (8, 1, 0)
    assert found['largest'] == 1e5
    half, brain = found['float16'], found['bfloat16']
    assert (half['overflow'], half['underflow'], half['subnormal']) == (1 / 8, 1 / 8, 1 / 8)
    # 3 * 2 ** -24 is a multiple of the smallest float16
    assert half['inexact'] == 1 / 8
    error = 2.0**-12 / (1 + 2.0**-12)
    assert half['largest_error'] == pytest.approx(error, rel=1e-6)
    # five are left that are neither zero nor lost
    assert half['rms_error'] == pytest.approx(error / math.sqrt(5), rel=1e-6)
    assert (brain['overflow'], brain['underflow'], brain['subnormal']) == (0, 0, 0)
    # 1e5, 1e-9 and 1 + 2 ** -12
    assert brain['inexact'] == 3 / 8


def test_activations_in_fp32_beside_those_at_the_level() -> None:
    model = nn.Sequential(linear([1.0], [4.0]), nn.Identity())
    found = module(amp.report(model, torch.tensor([[30000.0]]), 'O2'), '0')['ranges']
    assert found['inputs']['largest'] == 30000.0
    assert found['outputs']['largest'] == 120000.0
    assert found['outputs']['float16']['overflow'] == 1 / 2
    assert found['outputs']['at_level'] == {'largest': 30000.0, 'nonfinite': 1, 'zeros': 0}
    # without a loss, nothing is told of gradients
    assert sorted(found) == ['inputs', 'outputs', 'weights']


def test_all_calls_of_a_module_count() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear([2.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    found = module(amp.report(Twice(), torch.ones(1, 1), 'O5'), 'layer')['ranges']['outputs']
    assert found['powers'] == {'1': 1, '2': 1}
    assert found['largest'] == 4.0


def test_gradients_and_the_loss_scale_that_suits_them() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * 2.0**-30).sum()

    found = amp.report(linear([1.0, 1.0]), torch.tensor([[4.0, 1.0]]), 'O2', loss).data['gradients']
    # of the weights: 2 ** -28 and 2 ** -30; of the output: 2 ** -30
    assert found['weights']['powers'] == {'-28': 1, '-30': 1}
    assert found['outputs']['powers'] == {'-30': 1}
    assert found['best_scale'] == 2.0 ** (13 + 28)
    assert found['first_scale'] == 65536.0
    assert found['float16']['without_scale'] == {'overflow': 0, 'underflow': 1.0, 'subnormal': 0}
    # 2 ** -12 and 2 ** -14: normal numbers
    assert found['float16']['first_scale'] == {'overflow': 0, 'underflow': 0, 'subnormal': 0}
    assert found['bfloat16']['without_scale'] == {'overflow': 0, 'underflow': 0, 'subnormal': 0}


def test_a_loss_scale_that_is_too_high_overflows() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    found = amp.report(linear([1.0, 1.0]), torch.tensor([[4.0, 0.25]]), 'O2', loss, loss_scale=2.0**15).data[
        'gradients'
    ]
    # 4 * 2 ** 15 is too large, 1 * 2 ** 15 and 0.25 * 2 ** 15 are not
    assert found['float16']['first_scale'] == {'overflow': 1 / 3, 'underflow': 0, 'subnormal': 0}
    assert found['float16']['best_scale'] == {'overflow': 0, 'underflow': 0, 'subnormal': 0}
    assert found['best_scale'] == 2.0**11
    assert best_scale(measure_one(torch.zeros(3)), torch.float16) is None
    assert best_scale(measure_one(torch.tensor([2.0**20])), torch.float16) == 2.0**-7


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_rounding_against_float64(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1000, generator=generator) * 2.0 ** torch.randint(-40, 30, (1000,), generator=generator)
    numbers[:4] = torch.tensor([0.0, math.inf, math.nan, -math.inf])
    gathered = Gathering()
    for part in numbers.to(device).split([1, 499, 0, 500]):
        gathered.add([part])
    found = gathered.read()
    assert found is not None
    errors = []
    for number in numbers.tolist():
        rounded = float(torch.tensor(number).to(dtype))
        if math.isfinite(number) and number and math.isfinite(rounded) and rounded:
            errors.append(abs(rounded - number) / abs(number))
    lost = found.rounding[dtype]
    assert (lost.taken, lost.inexact) == (len(errors), sum(error > 0 for error in errors))
    assert lost.largest == pytest.approx(max(errors), rel=1e-6)
    assert lost.rms == pytest.approx(math.sqrt(sum(error**2 for error in errors) / len(errors)), rel=1e-6)
    assert found.ranges.total == 1000
    assert found.ranges.nonfinite == 3
    assert 0 < lost.taken <= 996


#: Numbers at the edges: where float16 overflows (65520), where it and bfloat16 round to zero, least normal numbers, the largest
#: bfloat16, subnormal float32 numbers.
EDGES = [
    65519.99,
    65520.0,
    65535.0,
    65536.0,
    2.0**-24,
    2.0**-25,
    2.0**-25 * (1 + 2.0**-23),
    2.0**-14,
    2.0**-14 - 2.0**-26,
]
EDGES += [3.3895313892515355e38, 3.3961776e38, 2.0**-126, 2.0**-133, 2.0**-134, 1.5 * 2.0**-134, 2.0**-149, 1e-40]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(EDGES) | st.floats(width=32, allow_subnormal=True), max_size=30),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from([1.0, 65536.0, 1000.0, 3.0, 0.5, 1e-3]),
)
def test_what_is_lost_is_what_the_cast_loses(numbers: list[float], dtype: torch.dtype, scale: float) -> None:
    """At any loss scale, and at each limit of the types."""
    values = torch.tensor(numbers, dtype=torch.float32)
    gathered = Gathering(scale=scale)
    for part in values.split(7):
        gathered.add([part])
    found = gathered.read()
    if not numbers:
        assert found is None
        return
    assert found is not None
    for lost, factor in ((found.rounding[dtype], 1.0), (found.scaled[dtype], scale)):
        scaled = values * factor
        cast = scaled.to(dtype)
        counts = values.isfinite() & (values != 0)
        assert lost.overflow == int((counts & ~cast.isfinite()).sum())
        assert lost.underflow == int((counts & (cast == 0)).sum())
        small = scaled.abs() < torch.finfo(dtype).tiny
        assert lost.subnormal == int((counts & (cast != 0) & small).sum())
    for power in (-126, -60, -25, -24, 0, 15, 127):
        assert found.at_most(power) == int(((values != 0) & (values.abs() <= 2.0**power)).sum())
    best = best_scale(found.ranges, torch.float16)
    if best is not None and 2.0**-30 < best < 2.0**100:
        cast, counts = (values * best).half(), values.isfinite() & (values != 0)
        assert not (counts & ~cast.isfinite()).any()
        lost_at_best = _lost_at_best(found, best)
        assert lost_at_best['underflow'] * len(numbers) == pytest.approx(int((counts & (cast == 0)).sum()))


@pytest.mark.parametrize('scale', [1000.0, 128.0, 3.0])
def test_a_static_scale_is_taken_as_it_is(scale: float) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    # gradients 100 and 65, and 1 of the output: 100 * 1000 overflows, 65 * 1000 = 65000 does not
    found = amp.report(linear([1.0, 1.0]), torch.tensor([[100.0, 65.0]]), 'O2', loss, loss_scale=scale).data[
        'gradients'
    ]
    assert found['first_scale'] == scale
    assert found['float16']['first_scale']['overflow'] == (1 / 3 if scale == 1000.0 else 0)


def test_half_of_the_smallest_number_becomes_zero_at_the_best_scale() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    # the largest, 2 ** 13, stays where it is; 2 ** -25 is a tie, which goes to zero, and what is above it does not
    batch = torch.tensor([[2.0**13, 2.0**-25, 2.0**-25 * 1.25]])
    found = amp.report(linear([1.0, 1.0, 1.0]), batch, 'O2', loss).data['gradients']
    assert found['best_scale'] == 1.0
    assert found['float16']['best_scale'] == {'overflow': 0, 'underflow': 1 / 4, 'subnormal': 1 / 4}
    assert found['float16']['without_scale'] == found['float16']['best_scale']
    assert 'best_scale' not in found['bfloat16']


def test_nothing_was_rounded() -> None:
    assert Gathering().read() is None
    assert Rounding().rms == 0.0


def test_lists_of_modules_have_their_place_among_the_largest_numbers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({'fc': nn.Linear(4, 4)})])
            self.empty = nn.ModuleList()
            self.idle = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0]['fc'](x)  # type: ignore[index, operator]

    shown = amp.report(Model(), torch.ones(2, 4), 'O2').text(width=130)
    largest = shown.partition('Largest numbers')[2].partition('Memory of one')[0]
    names = [
        line.split('  ')[0].strip() or line.strip().split('  ')[0] for line in largest.splitlines()[4:] if line.strip()
    ]
    assert names == ['Model', 'blocks ModuleList', '0 ModuleDict', 'fc Linear', 'idle Linear']


# -- memory ------------------------------------------------------------------------------------------------------------


def test_bytes_by_level_counted_by_hand() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), torch.zeros(2, 3))

    found = amp.report(nn.Linear(4, 3, bias=False), torch.ones(2, 4), 'O2', loss, make_optimizer=adam)
    memory = found.data['memory']
    # 12 weights; Adam has two numbers for each and a float32 step
    assert {level: counted['weights'] for level, counted in memory.items()} == {
        **dict.fromkeys(('O0', 'O1', 'O4'), 48),
        **dict.fromkeys(('O2', 'O3', 'O5'), 24),
    }
    assert {level: counted['masters'] for level, counted in memory.items()} == {
        **dict.fromkeys(('O0', 'O1', 'O3', 'O4'), 0),
        **dict.fromkeys(('O2', 'O5'), 48),
    }
    assert {level: counted['optimizer_state'] for level, counted in memory.items()} == {
        **dict.fromkeys(('O0', 'O1', 'O2', 'O4', 'O5'), 2 * 48 + 4),
        'O3': 2 * 24 + 4,
    }
    # kept for the backward pass: the 8 inputs of the layer, in FP32 or 16-bit; the 6 outputs and 6 targets of the loss, in FP32
    assert {level: counted['activations'] for level, counted in memory.items()} == {
        'O0': 32 + 48,
        **dict.fromkeys(('O1', 'O2', 'O3', 'O4', 'O5'), 16 + 48),
    }
    for counted in memory.values():
        parts = ('weights', 'buffers', 'masters', 'optimizer_state', 'gradients', 'activations')
        assert counted['total'] == sum(counted[part] for part in parts)
        assert counted['gradients'] == counted['weights']
    assert found.data['optimizer'] == 'Adam'


def test_without_an_optimizer_and_a_loss() -> None:
    found = amp.report(nn.Linear(4, 3), torch.ones(2, 4), 'O2').data
    assert found['optimizer'] is found['loss'] is found['gradients'] is None
    assert found['memory']['O2']['optimizer_state'] == 0
    # its masters are counted all the same
    assert found['memory']['O2']['masters'] == 15 * 4
    frozen = amp.report(nn.Linear(4, 3).requires_grad_(False), torch.ones(2, 4), 'O2').data
    assert frozen['memory']['O2']['masters'] == frozen['memory']['O2']['activations'] == 0


def test_a_first_step_that_would_be_skipped_is_counted_too() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * 1e5

    # 65536 times 1e5 is infinite in float16
    memory = amp.report(nn.Linear(4, 3), torch.ones(2, 4), 'O2', loss, make_optimizer=adam).data['memory']
    assert memory['O2']['optimizer_state'] == memory['O0']['optimizer_state'] > 0


def test_split_masters() -> None:
    def fused(model: nn.Module) -> torch.optim.Optimizer:
        from amp_wrapper.optim import FusedAdam

        return FusedAdam(model.parameters())

    found = amp.report(nn.Linear(4, 3), torch.ones(2, 4), 'O5', make_optimizer=fused, master_weights='split')
    assert module(found)['weights']['masters'] == 'split'
    assert found.data['memory']['O5']['masters'] == 15 * 2


def test_peaks_are_measured_on_a_gpu_alone(device: torch.device, report: PrecisionReport) -> None:
    model = nn.Linear(256, 256).to(device)
    subject = Subject(model, lambda copied: copied(torch.ones(64, 256, device=device)), False)
    peak = measured_peak(subject, resolve('O0'))
    if device.type == 'cpu':
        assert peak is None
        assert 'Peaks: not measured, no GPU.' in report.text(width=140)
        return
    # the weights of the copy and their gradients
    assert peak is not None
    assert peak >= 2 * 4 * (256 * 256 + 256)


# -- how it is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('width', [80, 140])
def test_the_table_fits_the_terminal(report: PrecisionReport, width: int) -> None:
    lines = report.text(width=width).splitlines()
    assert max(map(len, lines)) <= width
    text = '\n'.join(lines)
    for words in ('Precision of Sequential at O2', '0 Linear', 'fp16 + master', 'fp32→fp16', 'native_batch_norm', 'O5'):
        assert words in text
    assert ('gradient ' in text) == (width == 140)


def test_depth(report: PrecisionReport) -> None:
    assert '3 Linear' in report.text(depth=1)
    assert '3 Linear' not in report.text(depth=0)


def test_rich_and_str_show_the_same(report: PrecisionReport, capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=100).print(report.table())
    shown = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert '\n'.join(shown) == report.text(width=100)
    assert str(report).startswith('Precision of Sequential at O2')


def test_the_page_has_all_modules_and_the_json_is_the_data(report: PrecisionReport, tmp_path: Path) -> None:
    page, data = report.write(tmp_path)
    html = page.read_text(encoding='utf-8')
    assert html.count('<tr data-depth=') == len(report.data['modules']) == 6
    assert 'native_batch_norm: batchnorm' in html
    assert json.loads(data.read_text()) == json.loads(report.json())
    assert json.loads(report.json()) == report.data


def test_names_of_the_model_are_text_to_terminal_and_page() -> None:
    class Odd(nn.Sequential):
        pass

    Odd.__name__ = '[bold]<b>'
    found = amp.report(nn.Sequential(Odd(nn.Linear(2, 2))), torch.ones(1, 2), 'O5')
    # in two tables
    assert found.text(width=140).count('0 [bold]<b>') == 2
    assert '<b>' not in found.html().replace('<b>O5</b>', '').replace('<b>FP32', '')


#: The keys that users may rely on, and that docs/report.md describes.
KEYS = {
    '': 'format amp_wrapper torch title level policy options device mode compiled optimizer loss modules outputs '
    'gradients memory',
    'module': 'name class depth calls state weights inputs outputs gradients kept fp32_ops ops casts ranges',
    'op': 'op calls inputs output rule name reason',
    'ranges': 'elements largest zeros nonfinite powers float16 bfloat16 at_level',
    'type': 'overflow underflow subnormal inexact largest_error rms_error',
    'memory': 'weights buffers masters optimizer_state gradients activations total measured_peak',
}


def test_keys_of_the_json(report: PrecisionReport) -> None:
    bn = module(report, '2')
    found = {
        '': report.data,
        'module': bn,
        'op': bn['fp32_ops'][0],
        'ranges': bn['ranges']['outputs'],
        'type': bn['ranges']['outputs']['float16'],
        'memory': report.data['memory']['O2'],
    }
    assert {name: list(value) for name, value in found.items()} == {name: keys.split() for name, keys in KEYS.items()}
    assert report.data['format'] == 1
    described = (Path(__file__).parents[2] / 'docs' / 'report.md').read_text(encoding='utf-8')
    missing = [key for keys in KEYS.values() for key in keys.split() if f'`{key}`' not in described]
    assert missing == []
