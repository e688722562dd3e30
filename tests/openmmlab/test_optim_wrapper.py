"""Training with AmpOptimWrapper: bits against the plain wrapper, evaluation, losses, edits of weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from toy_wrapper import SGD, net, one_step, turn, two_wrappers, wrap

from amp_wrapper import (
    AmpAttachError,
    AmpOptimWrapper,
    AmpUsageError,
)

# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('words', [dict(opt_level='O0'), dict(opt_level='O2', enabled=False)], ids=['O0', 'disabled'])
@pytest.mark.parametrize('extra', [{}, dict(clip_grad=dict(max_norm=0.1), accumulative_counts=3)], ids=['bare', 'clip'])
def test_equal_to_the_plain_wrapper_bit_for_bit(words: dict[str, Any], extra: dict[str, Any], tmp_path: Path) -> None:
    plain = toy.run(tmp_path / 'plain', dict(type='OptimWrapper', optimizer=SGD, **copy.deepcopy(extra)))
    ours = toy.run(tmp_path / 'ours', dict(type='AmpOptimWrapper', optimizer=SGD, **words, **copy.deepcopy(extra)))
    left, right = toy.checkpoint(tmp_path / 'plain'), toy.checkpoint(tmp_path / 'ours')
    assert differences(left['state_dict'], right['state_dict']) == []
    for key in ('train/loss', 'val/toy/score', *(['train/grad_norm'] if 'clip_grad' in extra else [])):
        logs = [saved['message_hub']['log_scalars'][key].data[0].tolist() for saved in (left, right)]
        assert logs[0] == logs[1]
    if words.get('enabled') is False:
        assert differences(left['optimizer'], right['optimizer']) == []
    else:
        assert {'loss_scaler', 'amp'} <= right['optimizer'].keys()
        assert differences(left['optimizer']['state'], right['optimizer']['state']) == []
    assert type(plain.optim_wrapper) is OptimWrapper
    assert type(ours.optim_wrapper) is AmpOptimWrapper


@pytest.mark.parametrize('level', toy.LEVELS)
def test_powers_of_two_change_no_bit(level: str) -> None:
    results = []
    # scales between which nothing leaves the range of float16
    for scale in (2.0**8, 2.0**10):
        model = net()
        wrapper = wrap(model, opt_level=level, loss_scale=scale, clip_grad=dict(max_norm=0.5))
        losses = [one_step(model, wrapper) for _ in range(5)]
        results.append((losses, model.state_dict(), wrapper.optimizer.state_dict()['state']))
    assert differences(*results) == []


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9, foreach=True)),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9, fused=True)),
    (torch.optim.Adam, dict(lr=0.02, eps=1e-4, foreach=True)),
    (torch.optim.Adam, dict(lr=0.02, eps=1e-4, fused=True)),
    (torch.optim.AdamW, dict(lr=0.02, eps=1e-4)),
    (torch.optim.AdamW, dict(lr=0.02, eps=1e-4, fused=True)),
    (torch.optim.RMSprop, dict(lr=0.005, eps=1e-3)),
    (torch.optim.RMSprop, dict(lr=0.005, eps=1e-3, foreach=True)),
]


@pytest.mark.parametrize('level', toy.LEVELS)
@pytest.mark.parametrize('number', range(len(OPTIMIZERS)))
def test_every_optimizer_learns_at_every_level(level: str, number: int, device: torch.device) -> None:
    kind, words = OPTIMIZERS[number]
    model = toy.ToyModel().to(device)
    data = toy.ToyData()
    batch = dict(inputs=data.images.to(device), labels=data.labels.to(device))
    optimizer = kind(model.parameters(), **words)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer)
    losses = [float(model.train_step(dict(batch), wrapper)['loss']) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    expected = toy.HALF.get(level, torch.float32)
    assert model.conv.weight.dtype == expected
    assert model.bn.weight.dtype == (expected if level == 'O3' else torch.float32)
    stepped = {p.dtype for p in wrapper.master_params()}
    assert stepped == ({torch.float16} if level == 'O3' else {torch.float32})


# -- a whole life ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', toy.LEVELS)
def test_train_validate_test_and_call_parts_directly(level: str, tmp_path: Path) -> None:
    runner = toy.run(
        tmp_path,
        dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD, clip_grad=dict(max_norm=1.0)),
        test_dataloader=toy.loader(shuffle=False),
        test_evaluator=dict(type='ToyScore'),
        test_cfg=dict(),
    )
    model = runner.model
    assert model.data_preprocessor.mean.dtype == torch.float32
    score = runner.message_hub.get_scalar('val/toy/score').current()
    assert runner.test()['toy/score'] == score
    features = model.extract_feat(torch.randn(2, 1, 6, 6))
    assert features.dtype == toy.HALF.get(level, torch.float32)
    saved = toy.checkpoint(tmp_path)
    kinds = {value.dtype for value in saved['state_dict'].values()}
    assert kinds == {torch.float32, torch.int64}
    plain = toy.ToyModel()
    plain.load_state_dict(saved['state_dict'])


@pytest.mark.parametrize('level', toy.LEVELS)
def test_validation_may_autocast_too(level: str, tmp_path: Path) -> None:
    runner = toy.run(
        tmp_path,
        dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD),
        val_cfg=dict(fp16=True),
        val_evaluator=dict(type='ToyScore', fp32=False),
    )
    assert runner.message_hub.get_scalar('val/toy/score').current() < 0


def test_data_elements_pass_through_untouched() -> None:
    seen: list[Any] = []

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, inputs: Tensor, samples: list[BaseDataElement]) -> Tensor:
            seen.extend(samples)
            return self.fc(inputs)

    model = Detector()
    wrapper = wrap(model, opt_level='O2')
    sample = BaseDataElement(labels=torch.tensor([70001]), boxes=torch.rand(1, 4))
    with wrapper.optim_context(model):
        model(torch.randn(1, 4), samples=[sample])
    assert seen[0] is sample
    assert (sample.labels.item(), sample.labels.dtype, sample.boxes.dtype) == (70001, torch.int64, torch.float32)


def test_parse_losses_and_16_bit_losses_outside_the_context() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', cast_model_outputs=torch.float16, loss_scale=2.0**15)
    with wrapper.optim_context(model):
        out = model(torch.randn(6, 4))
    assert out.dtype == torch.float16
    # 2^15 times a loss of about 1000 is infinite in float16
    wrapper.update_params(out.mean() + 1000.0)
    assert wrapper.loss_scaler.counts.tolist() == [1, 0, 0]


def test_several_losses_by_id() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', num_losses=2, accumulative_counts=2)
    batch = torch.randn(6, 4)
    with wrapper.optim_context(model):
        out = model(batch)
        first, second = out.square().mean(), out.abs().mean()
    wrapper.update_params(first * float('inf'), loss_id=0)
    with wrapper.optim_context(model):
        second = model(batch).abs().mean()
    wrapper.update_params(second, loss_id=1)
    scales = [scaler.get_scale() for scaler in wrapper.loss_scalers]
    assert scales == [2.0**15, 2.0**16]
    with pytest.raises(AmpUsageError, match='loss_id=2'):
        wrapper.update_params(second, loss_id=2)


def test_scheduler_hooks_into_step_and_base_param_settings_survive() -> None:
    from mmengine.optim import LinearLR

    model = net()
    groups = [dict(params=[p], lr=0.1 * (i + 1)) for i, p in enumerate(model.parameters())]
    wrapper = wrap(model, opt_level='O2', optimizer=torch.optim.SGD(groups, lr=0.1))
    scheduler = LinearLR(wrapper, start_factor=0.5, end=4, by_epoch=False)
    for _ in range(3):
        one_step(model, wrapper)
        scheduler.step()
    saved = wrapper.state_dict()
    other = net()
    groups = [dict(params=[p], lr=0.1 * (i + 1)) for i, p in enumerate(other.parameters())]
    resumed = wrap(other, opt_level='O2', optimizer=torch.optim.SGD(groups, lr=0.1))
    before = copy.deepcopy(saved)
    resumed.load_state_dict(saved)
    assert differences(before, saved) == []
    assert resumed.get_lr() == wrapper.get_lr()
    assert resumed.base_param_settings['lr'] != 0.1
    one_step(other, resumed)


@pytest.mark.parametrize('level', toy.LEVELS)
def test_wrapper_dict_trains_two_networks(level: str) -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
            self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            self.perceptual = nn.Linear(4, 4).requires_grad_(False)

    torch.manual_seed(0)
    model = Gan()
    optimizers = {k: torch.optim.SGD(getattr(model, k).parameters(), lr=0.05) for k in ('generator', 'discriminator')}
    second = 'O0' if level == 'O2' else level
    wrappers = OptimWrapperDict(
        generator=AmpOptimWrapper(opt_level=level, optimizer=optimizers['generator']),
        discriminator=AmpOptimWrapper(opt_level=second, optimizer=optimizers['discriminator']),
    )
    wrappers.initialize_count_status(model, 0, 10)
    # attached before the first forward, not lazily: the generator must not run in FP32 in the discriminator's turn
    assert model.generator[0].weight.dtype == toy.HALF.get(level, torch.float32)
    assert model.discriminator[0].weight.dtype == toy.HALF.get(second, torch.float32)
    assert model.perceptual.weight.dtype == torch.float32
    real, noise = torch.randn(16, 4) + 1, torch.randn(16, 4)
    before = [
        p.detach().clone() for p in (*wrappers['generator'].master_params(), *wrappers['discriminator'].master_params())
    ]
    for _ in range(3):
        with wrappers['discriminator'].optim_context(model):
            fake = model.generator(noise).detach()
            loss = (model.discriminator(fake) - model.discriminator(real)).mean()
        wrappers['discriminator'].update_params(loss)
        with wrappers['generator'].optim_context(model):
            fake = model.generator(noise)
            loss = -model.discriminator(fake).mean() + (model.perceptual(fake.float()) - real).square().mean()
        wrappers['generator'].update_params(loss)
        wrappers['discriminator'].zero_grad()
    after = (*wrappers['generator'].master_params(), *wrappers['discriminator'].master_params())
    assert sum(not a.equal(b) for a, b in zip(before, after)) >= len(before) - 2
    again = wrappers.state_dict()
    wrappers.load_state_dict(again)


def test_detach_gives_everything_back() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2')
    for _ in range(3):
        one_step(model, wrapper)
    masters = [p.detach().clone() for p in wrapper.master_params()]
    wrapper.detach()
    assert differences(masters, [p.detach() for p in model.parameters()]) == []
    assert [id(p) for g in wrapper.optimizer.param_groups for p in g['params']] == [id(p) for p in model.parameters()]
    assert model(torch.randn(6, 4)).dtype == torch.float32


def test_runner_sees_the_error_before_any_work(tmp_path: Path) -> None:
    config = toy.toy_config(
        tmp_path, dict(type='AmpOptimWrapper', opt_level='O2', patch_torch_functions=True, optimizer=SGD)
    )
    runner = Runner.from_cfg(config)
    # mmengine keeps the type in the chain when a registry build fails
    with pytest.raises(Exception, match='patch_torch_functions=True conflicts'):
        runner.train()
    assert not list(tmp_path.glob('*.pth'))


# -- what reviewers broke ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', toy.LEVELS)
def test_a_weight_unfrozen_later_is_clipped(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    wrapper = wrap(
        model,
        opt_level=level,
        loss_scale=1.0,
        clip_grad=dict(max_norm=1e-2),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    batch = torch.randn(8, 4) * 10
    one_step(model, wrapper, batch)
    model[0].requires_grad_(True)
    before = model.state_dict()['0.weight'].clone()
    one_step(model, wrapper, batch)
    moved = (model.state_dict()['0.weight'] - before).norm()
    assert 0 < moved < 1.2e-2


def edited(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model[0].weight.fill_(value)


class Doubling(nn.Linear):
    """Changes its weight after loading it."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.weight.data.mul_(2)


class OwnLoader(nn.Linear):
    """Loads its weight by itself."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.weight.data.copy_(state_dict[prefix + 'weight'])


@pytest.mark.parametrize('loads', ['torch', 'mmengine'])
def test_a_partial_load_leaves_other_edits_alone(loads: str) -> None:
    from mmengine.runner.checkpoint import load_state_dict

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapper = wrap(model, opt_level='O2')
    one_step(model, wrapper)
    edited(model, 3.0)
    part = {'1.bias': torch.zeros(2)}
    model.load_state_dict(part, strict=False) if loads == 'torch' else load_state_dict(model, part)
    assert bool((model.state_dict()['0.weight'] == 3.0).all())
    assert bool((model[0].weight == 3.0).all())


@pytest.mark.parametrize(('kind', 'expected'), [(Doubling, 2.0), (OwnLoader, 1.0)])
def test_modules_that_load_in_their_own_way_win(kind: type[nn.Linear], expected: float) -> None:
    model = nn.Sequential(kind(4, 4), nn.Linear(4, 2))
    wrapper = wrap(model, opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    one_step(model, wrapper)
    state = {**model.state_dict(), '0.weight': torch.ones(4, 4)}
    model.load_state_dict(state)
    one_step(model, wrapper)
    assert bool((model.state_dict()['0.weight'] == expected).all())
    assert bool((model[0].weight == expected).all())


@pytest.mark.parametrize('level', toy.LEVELS)
def test_predictions_inside_data_elements_are_fp32(level: str) -> None:
    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> list[BaseDataElement]:
            inner = BaseDataElement(boxes=self.fc(inputs))
            return [BaseDataElement(scores=self.fc(inputs), pred=inner, labels=torch.tensor([70001]))]

    model = Predictor()
    wrapper = wrap(model, opt_level=level)
    wrapper.attach(model)
    (sample,) = model(torch.randn(1, 4))
    assert (sample.scores.dtype, sample.pred.boxes.dtype) == (torch.float32, torch.float32)
    assert (sample.labels.item(), sample.labels.dtype) == (70001, torch.int64)
    sample.scores.detach().numpy()


@pytest.mark.parametrize('level', ['O0', 'O1', 'O4', 'O2'])
def test_frozen_16_bit_parts_beside_fp32_ones(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].bfloat16().requires_grad_(False)
    wrapper = wrap(model, opt_level=level, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    wrapper.attach(model)
    assert model[0].weight.dtype == (torch.float16 if level == 'O2' else torch.bfloat16)
    trainable = nn.Linear(4, 2).half()
    with pytest.raises(AmpAttachError, match='16-bit already'):
        wrap(trainable, opt_level=level).attach(trainable)


def test_wrappers_of_a_dict_attach_together_without_a_runner() -> None:
    model, wrappers = two_wrappers()
    model['d'].requires_grad_(False)
    with wrappers['g'].optim_context(model):
        assert model['d'].weight.dtype == model['g'].weight.dtype == torch.float16
    model['d'].requires_grad_(True)
    turn(model, wrappers, 0)
    assert [len(list(wrappers[key].master_params())) for key in ('g', 'd')] == [2, 2]


def test_optimizers_whose_eps_is_no_number_attach_at_o3() -> None:
    model = nn.Linear(4, 4)
    wrapper = wrap(model, opt_level='O3', optimizer=torch.optim.Adafactor(model.parameters()))
    wrapper.attach(model)
    assert model.weight.dtype == torch.float16
    other = nn.Linear(4, 4)
    with toy.captured_log() as lines:
        wrap(other, opt_level='O3', optimizer=torch.optim.Adam(other.parameters())).attach(other)
    assert any('eps=1e-08 is 0' in line for line in lines)


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('level', toy.LEVELS)
def test_recomputed_segments_see_the_same_casts(level: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(4, 4)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.MSELoss())
            self.recompute = recompute

        def forward(self, x: Tensor) -> Tensor:
            def part(y: Tensor) -> Tensor:
                return self.body[3](self.body[:3](y), torch.zeros_like(y))

            y = self.head(x)
            return checkpoint(part, y, use_reentrant=reentrant) if self.recompute else part(y)

    ends = []
    for recompute in (True, False):
        model = Block(recompute)
        wrapper = wrap(model, opt_level=level)
        for _ in range(2):
            one_step(model, wrapper)
        ends.append(model.state_dict())
    assert differences(*ends) == []


@pytest.mark.parametrize('attached', [False, True])
def test_scalar_state_keeps_its_type_at_o3(attached: bool) -> None:
    model = nn.Linear(4, 4)
    wrapper = wrap(model, opt_level='O3', optimizer=torch.optim.NAdam(model.parameters(), eps=1e-3))
    for _ in range(2):
        one_step(model, wrapper)
    other = nn.Linear(4, 4)
    resumed = wrap(other, opt_level='O3', optimizer=torch.optim.NAdam(other.parameters(), eps=1e-3))
    if attached:
        resumed.attach(other)
    resumed.load_state_dict(wrapper.state_dict())
    resumed.attach(other)
    assert differences(wrapper.optimizer.state_dict()['state'], resumed.optimizer.state_dict()['state']) == []


def test_the_clip_limit_may_change_between_steps() -> None:
    model = nn.Linear(4, 2)
    wrapper = wrap(
        model,
        opt_level='O2',
        loss_scale=1.0,
        clip_grad=dict(max_norm=1e3),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    one_step(model, wrapper)
    wrapper.clip_grad_kwargs['max_norm'] = 1e-3
    before = model.state_dict()['weight'].clone()
    one_step(model, wrapper)
    assert (model.state_dict()['weight'] - before).norm() < 1.1e-3


def test_a_weight_is_added_to_the_optimizer_once() -> None:
    model = nn.Linear(4, 2)
    wrapper = wrap(model, opt_level='O2')
    wrapper.attach(model)
    wrapper.optimizer.add_param_group(dict(params=[model.weight]))
    with pytest.raises(AmpUsageError, match='weight was added to the optimizer a second time'):
        one_step(model, wrapper)
