"""The precision report on models of which it is known what runs in FP32, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import differences
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import amp
from amp_wrapper.diagnostics.precision_report import PrecisionReport
from amp_wrapper.errors import AmpConfigError, AmpUsageError

Module = dict[str, Any]


class Known(nn.Module):
    """Each module has FP32 ops of one known cause, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.loss = nn.CrossEntropyLoss()
        self.register_buffer('matrix', torch.eye(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu().mean((2, 3))
        x = self.norm(x) @ torch.linalg.inv(self.matrix)
        x = self.head(torch.softmax(x, -1).float() * 2)
        x = self.parts[0](self.parts[0](x))
        return self.loss(x, labels)


def run(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


@pytest.fixture
def known() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Known(), (torch.randn(2, 1, 6, 6), torch.tensor([0, 1]))


def by_name(report: PrecisionReport) -> dict[str, Module]:
    return {module['name']: module for module in report.data['modules']}


def causes(module: Module) -> list[tuple[str, str, str]]:
    """(op, rule, name) of what ran in FP32."""
    return [(op['op'], op['rule'], op['name']) for op in module['fp32_ops']]


@pytest.mark.parametrize('level, half', [('O2', 'float16'), ('O5', 'bfloat16')])
def test_what_runs_in_fp32_where_the_model_is_cast(known: Any, level: str, half: str) -> None:
    model, batch = known
    found = by_name(amp.report(model, batch, level, run, fp32_ops=['torch.Tensor.relu'], keep_fp32=['norm']))
    assert causes(found['']) == [
        ('relu', 'fp32_ops', 'torch.Tensor.relu'),
        ('linalg_inv_ex', 'registry', 'torch.linalg.inv'),
        # .float() by the model itself
        ('mul', 'FP32 input', ''),
    ]
    assert causes(found['bn']) == [('native_batch_norm', 'batchnorm', '')]
    assert causes(found['norm']) == [('native_layer_norm', 'keep_fp32', 'norm')]
    assert causes(found['loss']) == [('_log_softmax', 'loss', ''), ('nll_loss_forward', 'loss', '')]
    assert causes(found['conv']) == causes(found['head']) == []
    assert found['conv']['ops'] == {half: {'convolution': 1}}
    assert found['parts.0']['ops'] == {half: {'addmm': 2}}
    assert found['']['ops'][half] == {'mean': 1, 'mm': 1, '_softmax': 1}
    assert found['bn']['fp32_ops'][0]['inputs'] == [half, 'float32']
    assert found['']['fp32_ops'][1]['reason'] == 'has no 16-bit kernel, or one whose results are far off'


@pytest.mark.parametrize('level, half', [('O1', 'float16'), ('O4', 'bfloat16')])
def test_what_runs_in_fp32_under_autocast(known: Any, level: str, half: str) -> None:
    model, batch = known
    found = by_name(amp.report(model, batch, level, run))
    assert causes(found['']) == [
        ('linalg_inv_ex', 'registry', 'torch.linalg.inv'),
        ('_softmax', 'autocast', 'softmax.int'),
        ('mul', 'FP32 input', ''),
    ]
    assert causes(found['bn']) == [('native_batch_norm', 'FP32 weights', '')]
    assert causes(found['norm']) == [('native_layer_norm', 'autocast', 'layer_norm')]
    assert {cause[1] for cause in causes(found['loss'])} == {'loss'}
    assert found['head']['ops'] == {half: {'addmm': 1}}
    # the cast of an op is inside of the module
    assert found['head']['casts'] == {f'float32 to {half}': 3}
    assert found['head']['inputs'] == {'given': ['float32'], 'computed': ['float32']}


def test_torchs_own_list_of_autocast_and_rules_of_the_script() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(x, self.weight)
            # on torch's list for CPUs, no kernel of ours
            y = F.pad(x, (1, 1), mode='reflect')[:, 1:-1]
            return mine(x) + y

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

    @amp.float_function
    def mine(x: Tensor) -> Tensor:
        return x.sin()

    found = by_name(amp.report(Model(), torch.randn(2, 4), 'O1'))['']
    ops = {op['op']: (op['rule'], op['name'].rpartition('.')[2]) for op in found['fp32_ops']}
    assert ops['sin'] == ('user rule', 'mine')
    assert ops['reflection_pad1d'] == ('autocast', 'pad')
    assert found['ops']['float16'] == {'mm': 1}


def test_types_of_weights_inputs_outputs_and_gradients(known: Any) -> None:
    model, batch = known
    found = by_name(amp.report(model, batch, 'O2', run, keep_fp32=['head']))
    assert found['conv']['weights'] == {'types': {'float16': 40}, 'elements': 40, 'bytes': 80, 'masters': 'float32'}
    assert found['bn']['weights'] == {'types': {'float32': 8}, 'elements': 8, 'bytes': 32, 'masters': None}
    assert found['']['weights'] is None
    # the model casts what it is given
    assert found['']['inputs'] == {'given': ['float32'], 'computed': ['float16']}
    # kept in FP32, and the 16-bit type goes on outside of it
    assert found['head']['weights']['types'] == {'float32': 20}
    assert found['head']['outputs'] == {'computed': ['float32'], 'given': ['float16']}
    assert found['conv']['gradients'] == ['float16']
    assert found['head']['gradients'] == ['float32']


def test_calls_are_counted(known: Any) -> None:
    model, batch = known
    found = by_name(amp.report(model, batch, 'O5', run))
    assert {name: (module['state'], module['calls']) for name, module in found.items()} == {
        '': ('called', 1),
        'conv': ('called', 1),
        'bn': ('called', 1),
        'norm': ('called', 1),
        'head': ('called', 1),
        'unused': ('not called', 0),
        'parts': ('container', 0),
        'parts.0': ('called', 2),
        'loss': ('called', 1),
    }
    assert [module['depth'] for module in found.values()] == [0, 1, 1, 1, 1, 1, 1, 2, 1]


def test_a_loss_outside_of_the_model() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), torch.zeros(2, 3))

    outside = amp.report(nn.Linear(4, 3), torch.randn(2, 4), 'O2', loss).data['modules'][-1]
    assert outside['state'] == 'outside'
    assert causes(outside) == [('mse_loss', 'outside', '')]


def test_fp32_reports_no_reasons(known: Any) -> None:
    model, batch = known
    found = amp.report(model, batch, 'O0', run)
    assert [op for module in found.data['modules'] for op in module['fp32_ops']] == []
    assert by_name(found)['conv']['ops'] == {'float32': {'convolution': 1}}


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpointed_segments_count_once(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    found = by_name(amp.report(Model(), torch.randn(2, 4), 'O2', loss))
    assert found['second']['calls'] == 1
    assert found['second']['ops'] == {'float16': {'addmm': 1}}
    assert found['second']['gradients'] == ['float16']
    assert found['second']['ranges']['output_gradients']['elements'] == 8


@pytest.mark.parametrize('example', [(torch.ones(2, 4),), dict(x=torch.ones(2, 4)), torch.ones(2, 4)])
def test_examples_in_containers(example: Any) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return dict(out=[super().forward(x)], count=1)

    found = by_name(amp.report(Model(4, 3), example, 'O2'))['']
    assert found['inputs'] == {'given': ['float32'], 'computed': ['float16']}
    assert found['outputs'] == {'computed': ['float16'], 'given': ['float32']}


def test_scripted_parts_and_inference_mode() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    with torch.inference_mode():
        found = by_name(amp.report(model, torch.randn(2, 4), 'O4'))
    assert found['0']['state'] == 'scripted'
    assert found['1']['state'] == 'called'
    # the ops of the first are those of what calls it
    assert found['']['ops'] == found['1']['ops'] == {'bfloat16': {'addmm': 1}}


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('attached', [False, True])
def test_everything_is_as_before(training: bool, attached: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train(training)
    if attached:
        model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level='O5', verbosity=0)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    example = torch.randn(8, 4)
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]

    def state() -> dict[str, Any]:
        return {
            'weights': {name: tensor.detach().clone() for name, tensor in model.named_parameters()},
            'buffers': {name: tensor.clone() for name, tensor in model.named_buffers()},
            'gradients': [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            'generator': torch.get_rng_state(),
            'example': example.clone(),
        }

    def loss(copied: nn.Module, x: Tensor) -> Tensor:
        x += 1
        return copied(x).sum()

    before = state()
    found = amp.report(model, example, 'O2', loss)
    assert differences(before, state()) == []
    assert [part.training for part in model.modules()] == [training] * 5
    assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()] == hooks
    assert found.data['mode'] == ('training' if training else 'evaluation')
    assert by_name(found)['0']['weights']['types'] == {'float16': 20}


@pytest.mark.parametrize(
    'call, error, words',
    [
        (lambda model, x: amp.report(model, x, 'O2', keep_fp23=['x']), AmpConfigError, "did you mean 'keep_fp32'"),
        (lambda model, x: amp.report(model, x, 'O7'), AmpConfigError, "opt_level='O7'"),
        (lambda model, x: amp.report(print, x), AmpUsageError, 'must be a torch.nn.Module'),
        (
            lambda model, x: amp.report(model, x, loss_fn=lambda m, x: m(x)),
            AmpUsageError,
            'a tensor of shape \\(2, 3\\)',
        ),
        (lambda model, x: amp.report(model, x, loss_fn=lambda m, x: {}), AmpUsageError, 'gave dict'),
        (lambda model, x: amp.report(model, iter([x])), AmpUsageError, 'example=list_iterator can be read once'),
        (lambda model, x: amp.report(model, (y for y in [x])), AmpUsageError, 'example=generator can be read once'),
        (lambda model, x: amp.report(model, x, loss_fn='mse'), AmpConfigError, 'loss_fn=str must be a function'),
        (
            lambda model, x: amp.report(model, x, make_optimizer=torch.optim.SGD(model.parameters(), 0.1)),
            AmpConfigError,
            'make_optimizer=SGD must be a function',
        ),
        (
            lambda model, x: amp.report(model, x, make_optimizer=torch.optim.AdamW),
            AmpConfigError,
            r'make_optimizer=AdamW is the class.*lambda model: AdamW\(model.parameters\(\)',
        ),
        (
            lambda model, x: amp.report(model, x, make_optimizer=lambda model: None),
            AmpUsageError,
            'make_optimizer.* gave None: it must return a torch.optim.Optimizer',
        ),
    ],
)
def test_errors(call: Callable[..., Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(nn.Linear(4, 3), torch.ones(2, 4))


@pytest.mark.parametrize('words', [dict(keep_fp32=['nothing']), dict(fp32_ops=['torch.nn.GRU'])])
def test_names_that_the_model_does_not_have_are_refused_before_anything_runs(words: Any) -> None:
    class Never(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    with pytest.raises(AmpConfigError, match='matches no module'):
        amp.report(Never(4, 3), torch.ones(2, 4), 'O2', **words)


def test_why_ops_of_embeddings_float64_and_complex_numbers_run_as_they_do() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            z = torch.view_as_real(y * self.phase).sum(-1)
            return z.double() * 2 + y

    found = by_name(amp.report(Model(), torch.arange(3), 'O1'))
    assert causes(found['embed']) == [('embedding', 'FP32 weights', '')]
    rules = {(op['op'], op['rule'], *op['inputs']) for op in found['']['fp32_ops']}
    assert ('mul', 'complex', 'float32', 'complex64') in rules
    assert ('mul', 'float64', 'float64') in rules
    assert ('add', 'float64', 'float64', 'float32') in rules
    assert found['']['weights']['types'] == {'complex64': 4}


def test_buffers_are_no_weights_but_for_running_statistics() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.gain = nn.Parameter(torch.ones(8))
            self.register_buffer('mask', torch.zeros(8))
            self.plain = nn.BatchNorm1d(8, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return self.layer(self.plain(self.layer(x + self.mask)) * self.gain)

    found = by_name(amp.report(Model(), torch.randn(4, 8), 'O1'))
    assert causes(found['']) == [('add', 'mixed types', ''), ('mul', 'FP32 weights', '')]
    assert causes(found['plain']) == [('native_batch_norm', 'FP32 weights', '')]


def test_an_optimizer_is_made_for_a_copy_alone() -> None:
    """Whatever a function that makes an optimizer does to a model, such as freezing some of it."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def make(copied: nn.Module) -> torch.optim.Optimizer:
        copied[0].requires_grad_(False)  # type: ignore[index]
        copied.touched = True  # type: ignore[assignment]
        return torch.optim.AdamW(copied[1].parameters())  # type: ignore[index]

    before = torch.get_rng_state()
    found = amp.report(model, torch.ones(2, 4), 'O2', lambda m, x: m(x).sum(), make_optimizer=make)
    assert found.data['optimizer'] == 'AdamW'
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model, 'touched')
    assert torch.equal(before, torch.get_rng_state())


def test_any_error_of_another_level_is_told_and_the_others_are_counted() -> None:
    class Table(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * {torch.float32: 1.0, torch.bfloat16: 2.0}[y.dtype]

    memory = amp.report(Table(4, 3), torch.ones(2, 4), 'O5').data['memory']
    errors = {level: counted['error'] for level, counted in memory.items() if 'error' in counted}
    assert errors == dict.fromkeys(('O1', 'O2', 'O3'), 'KeyError: torch.float16')


def test_an_example_of_objects_is_copied_for_each_level() -> None:
    """Models write into samples: each level has to get them as they were."""

    class Sample:
        def __init__(self, x: Tensor) -> None:
            self.x, self.reads = x, 0

    class Reads(nn.Sequential):
        def forward(self, samples: list[Sample]) -> Tensor:  # type: ignore[override]
            assert samples[0].reads == 0
            samples[0].reads += 1
            samples[0].x = samples[0].x * 2
            return super().forward(samples[0].x)

    sample = Sample(torch.ones(2, 4))
    found = amp.report(Reads(nn.Linear(4, 3)), ([sample],), 'O2')
    assert 'error' not in str(found.data['memory'])
    assert sample.reads == 0
    assert torch.equal(sample.x, torch.ones(2, 4))


def test_a_level_that_the_model_cannot_have_is_told_and_the_others_are_counted() -> None:
    class Refused(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled(x.device.type):
                raise NotImplementedError('not under autocast')
            return super().forward(x).sum()

    found = amp.report(Refused(4, 3), torch.ones(2, 4), 'O2', lambda model, x: model(x))
    memory = found.data['memory']
    assert f'O1: {memory["O1"]["error"]}' in found.text(width=400)
    assert max(map(len, found.text(width=80).splitlines())) <= 80
    assert memory['O1']['error'] in found.html().replace('&#39;', "'")
    assert memory['O1']['error'].startswith('NotImplementedError: not under autocast')
    assert {level for level, counted in memory.items() if 'error' in counted} == {'O1', 'O4'}
