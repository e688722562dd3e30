"""What other people's models do: masks of every making, hooks that collect, calls that no loss needs, odd outputs."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bits import differences
from torch import Tensor, nn
from toy_overflow import Deep, Fault, batches, examine, in_range_of_fp32, nan_input, square

from amp_wrapper import amp
from amp_wrapper.diagnostics import recorder


class Masked(nn.Module):
    """Attention with a causal mask, and a gain that float16 cannot hold in the second of three blocks."""

    def __init__(self, make: str) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.make = make
        mask = torch.full((6, 6), -torch.inf).triu(1)
        if make == 'buffer':
            self.register_buffer('mask', mask)
        elif make == 'parameter':
            self.mask = nn.Parameter(mask, requires_grad=False)
        else:
            self.held = (mask,)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.make == 'logarithm':
            mask = torch.ones(6, 6).tril().log()
        else:
            mask = self.held[0] if self.make == 'attribute' else self.mask
        for index, block in enumerate(self.blocks):
            scores = block(x) @ x.transpose(0, 1) + mask.to(x.dtype)
            if index == 1:
                scores = in_range_of_fp32(scores)
            x = x + scores.softmax(-1) @ x
        return x


@pytest.mark.parametrize('level', ['O1', 'O2'])
@pytest.mark.parametrize('make', ['buffer', 'parameter', 'attribute', 'logarithm'])
def test_masks_are_no_cause(make: str, level: str) -> None:
    torch.manual_seed(0)
    (found,) = examine(Masked(make), level, batches(1))
    assert found.cause == 'forward_range', found.text
    assert 'in_range_of_fp32' in found.source


@pytest.mark.parametrize('reduce', [torch.Tensor.mean, torch.Tensor.neg], ids=['mean', 'neg'])
def test_a_logarithm_of_zero_that_is_no_mask(reduce: Callable[[Tensor], Tensor]) -> None:
    class Entropy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            chances = self.fc(x).relu()
            return reduce(chances.log())

    (found,) = examine(Entropy(), 'O2', batches(1))
    assert found.cause == 'forward_nan'
    assert found.op == 'aten.log'


@pytest.mark.parametrize('kind', ['closure', 'method', 'object'])
def test_hooks_that_collect_see_no_copy(kind: str) -> None:
    """A feature is taken by a hook and is a part of the loss: that of the copy must never get there."""

    class Collector:
        def __init__(self) -> None:
            self.features: list[Tensor] = []

        def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.features.append(output)

    runs = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Deep()
        collector = Collector()
        features = collector.features
        hooks: dict[str, Callable[..., Any]] = {
            'closure': lambda module, args, output: features.append(output),  # noqa: B023
            'method': collector.__call__,
            'object': collector,
        }
        model.blocks[1].register_forward_hook(hooks[kind])
        model, optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level='O2', verbosity=0
        )
        watch = amp.monitor(optimizer, diagnose_overflow=watched)
        for index, x in enumerate(batches(5)):
            optimizer.zero_grad()
            loss = square(model(nan_input(x) if index in (1, 2) else x)) + square(features[0])
            features.clear()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert len(watch.diagnoses) == (2 if watched else 0)
        watch.close()
        runs.append(model.state_dict())
    assert differences(runs[0], runs[1]) == []


def test_a_batch_that_was_thrown_away_is_not_blamed() -> None:
    model, optimizer = amp.initialize(
        (model := Deep()), torch.optim.SGD(model.parameters(), lr=0.01), opt_level='O2', verbosity=0
    )
    first, second = batches(2)
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        assert not square(model(first * 1e7)).isfinite()
        with amp.scale_loss(square(model(second)) * torch.nan, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert [each.cause for each in watch.diagnoses] == ['loss']


def test_what_is_not_there_again() -> None:
    """The model counts its calls, and gives its own loss."""

    class Counts(Deep):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            Counts.calls += 1
            return square(super().forward(x)) * (torch.inf if Counts.calls == 2 else 1.0)

    found = examine(Counts(), 'O2', batches(3), lambda output: output)
    assert [each.cause for each in found] == ['not_reproduced']


def test_a_place_a_thousand_ops_away() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.fault = nn.Linear(4, 4), Fault(in_range_of_fp32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.fault(self.stem(x))
            for _ in range(1100):
                x = x + 1e-3
            return x

    (found,) = examine(Long(), 'O2', batches(1))
    assert (found.cause, found.module) == ('forward_range', 'fault')


@pytest.mark.parametrize('kind', ['slices', 'complex'])
def test_the_trail_goes_on(kind: str) -> None:
    """Through a tensor that is written in parts, and through complex numbers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.fault = nn.Linear(4, 4), Fault(in_range_of_fp32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            if kind == 'complex':
                return torch.fft.rfft(self.fault(x).float()).abs()
            out = x.new_zeros(6, 8)
            out[:, :4] = self.fault(x)
            out[:, 4:] = x
            return out

    (found,) = examine(Model(), 'O2', batches(1))
    assert (found.cause, found.module) == ('forward_range', 'fault'), found.text


def test_outputs_in_which_nothing_is_found() -> None:
    class Wraps(Deep):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(y=super().forward(x))

    found = examine(Wraps(), 'O2', [nan_input(x) for x in batches(2)], lambda output: square(output.y))
    assert found[0].cause == 'not_replayed'
    assert 'compile' not in found[0].text
    assert found[1].cause == 'input'


def test_a_model_that_changes_its_input() -> None:
    class Subtracts(Deep):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.sub_(0.5))

    # at O1 nothing casts the input first
    found = examine(Subtracts(), 'O1', [nan_input(x) for x in batches(2)])
    assert [each.cause for each in found] == ['not_replayed', 'input']


def test_dicts_that_the_model_empties() -> None:
    class Pops(Deep):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch.pop('x'))

    inputs: list[Any] = [{'x': nan_input(x)} for x in batches(1)]
    (found,) = examine(Pops(), 'O2', inputs)
    assert found.cause == 'input'


def test_parameters_that_are_outputs_get_no_hooks() -> None:
    class Returns(Deep):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.stem.bias

    model = Returns()
    examine(model, 'O1', batches(3), lambda outputs: square(outputs[0]))
    assert not model.stem.bias._backward_hooks


def test_names_of_samples_are_few_and_short() -> None:
    batch = {'indices': torch.arange(100_000), 'token': torch.randn(10), 'image_id': [7, 'a'], 'path': ['x'] * 999}
    found = recorder.identifiers(batch)
    assert len(found['indices']) == recorder.MOST_SAMPLES
    assert found['token'] == []
    assert found['image_id'] == ['7', 'a']
    assert len(found['path']) == recorder.MOST_SAMPLES


def test_evaluations_are_not_watched() -> None:
    """Where modules are watched, those of an evaluation are not."""

    class Uncopyable(Deep):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError('no')

    model = Uncopyable()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level='O2', verbosity=0)
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        for index, x in enumerate(batches(3)):
            with amp.scale_loss(square(model(x)) * (1.0 if index == 1 else torch.inf), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(nan_input(x))
    assert [each.cause for each in watch.diagnoses] == ['not_replayed', 'gradient']


def test_the_page_says_where_the_forward_pass_alone_was_tried(tmp_path: Path) -> None:
    """The loss is outside of the model, and its gradient at outputs that were infinite is none of finite ones."""
    model = nn.Sequential(nn.Linear(4, 4), Fault(lambda x: x * 1e5 * 1e5), nn.Linear(4, 2))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level='O2', verbosity=0)
    with amp.monitor(optimizer, folder=tmp_path, diagnose_overflow=True) as watch:
        with amp.scale_loss(model(torch.randn(8, 4)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    (found,) = watch.diagnoses
    page = (tmp_path / 'amp_diagnosis/iter_1.html').read_text()
    assert [remedy.setting for remedy in found.remedies if remedy.forward_only]
    table = page.partition('What was tried on this step')[2].partition('</table>')[0]
    for remedy in found.remedies:
        setting = html.escape(remedy.setting).replace('&#x27;', '&#39;')
        row = table.partition(f'{setting}</td>')[2].partition('</tr>')[0]
        assert ('>finite in its forward pass<' in row) == remedy.forward_only
        assert '>finite<' not in row


class SlicedMask(nn.Module):
    """As models of language write it: a causal mask of the longest text, of which the model hands a part to its blocks."""

    def __init__(self, filled: float) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.gain = 1e6
        self.register_buffer('mask', torch.full((16, 16), filled).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        # wider than long: more of it is masked than of the whole
        mask = self.mask[:3, :8]
        for place, block in enumerate(self.blocks):
            y = block(x)
            x = (y.mT @ y * (self.gain if place == 1 else 1.0))[:, :3] + mask
            x = (x.softmax(-1) @ y.mT).mT[..., :3].mT.repeat(1, 2, 3)[:, :6, :8] if x.shape[-1] != 8 else x.softmax(-1)
        return x


@pytest.mark.parametrize('filled', [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_a_part_of_a_mask_is_a_mask(filled: float, level: str) -> None:
    (found,) = examine(SlicedMask(filled), level, [torch.randn(2, 3, 4)])
    assert (found.cause, found.module) == ('forward_range', ''), found.text
    assert 'aten.mul made' in found.text
    assert 'self.gain' in found.source


@pytest.mark.parametrize('width', [8, 16])
def test_a_layer_mixes_what_it_is_given_however_wide_it_is(width: int) -> None:
    class Logarithm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu().log())

    (found,) = examine(Logarithm(), 'O2', [torch.randn(8, 4)])
    assert (found.cause, found.module) == ('forward_nan', '')
    assert 'aten.log made' in found.text


class Parts(nn.Module):
    """Called part by part, with an activation that writes to its input, so that no call can be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 2)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.act(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


@pytest.mark.parametrize(
    ('spoil', 'cause', 'text'),
    [
        (nan_input, 'input', 'What the model was given holds NaN'),
        (lambda x: x * 0 + 3e6, 'input_range', 'numbers up to 3e+06, and the type of the level ends at 65504'),
        (lambda x: x * 0 + 6e4, 'forward', 'is that of stem (ParametrizedLinear), after numbers up to 6e+04'),
    ],
)
def test_watched_parts_are_told_from_what_they_are_given(
    spoil: Callable[[Tensor], Tensor], cause: str, text: str
) -> None:
    torch.manual_seed(0)
    model = Parts()
    with torch.no_grad():
        model.stem.parametrizations.weight.original0.fill_(9.0)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.01), opt_level='O2', loss_scale=1.0, verbosity=0
    )
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        for step in range(3):
            x = torch.randn(8, 4)
            loss = square(model.head(model.forward_features(spoil(x) if step else x)))
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [each.cause for each in watch.diagnoses] == ['not_replayed', cause]
    assert text in watch.diagnoses[1].text


@pytest.mark.parametrize(('eps', 'told'), [(1e-8, True), (1e-4, False)])
def test_an_eps_that_is_zero_in_the_type_of_the_weights(eps: float, told: bool) -> None:
    def spoil(index: int, model: nn.Module, wrapper: Any) -> None:
        with torch.no_grad():
            model.blocks[1].fc2.weight[0, 0] = torch.nan

    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps)
    (found,) = examine(model, 'O3', batches(1), optimizer=optimizer, before=spoil)
    assert found.cause == 'weight'
    assert ('its eps=1e-08 is zero' in found.text) == told
    (found,) = examine(Deep(), 'O2', batches(1), before=spoil)
    assert 'eps=' not in found.text
