"""tools/migrate_from_apex.py: names and their scopes, and the arguments of calls."""

from __future__ import annotations

import inspect

import pytest
from migration import left, migrate, migrated

import amp_wrapper

# -- names and scopes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'text',
    [
        'from torch.cuda import amp\namp._amp_state\n# apex\n',
        'from .apex import amp\namp._amp_state.handle\n',
        'def f(apex):\n    return apex.optimizers.FusedLAMB\n',
        'import other as apex\napex.optimizers.FusedLAMB()\n',
        "choices = ['native', 'apex']\n",
        '"""Trains as apex.amp did."""\n',
        'class A:\n    apex = 1\n    x = apex\n',
        'def f(fp16=dict(loss_scale=1)):\n    fp16 = dict(loss_scale=2)\n    return fp16\n',
    ],
)
def test_what_only_looks_like_apex_is_left_alone(text: str) -> None:
    assert migrated(text) == text
    assert left(text) == []


def test_a_local_name_hides_the_import() -> None:
    text = 'from apex.optimizers import FusedAdam\n\n\ndef f(FusedAdam):\n    return FusedAdam(1)\n\n\nFusedAdam(1)\n'
    expected = text.replace('from apex.optimizers import FusedAdam', 'from amp_wrapper import FusedAdamW')
    assert migrated(text) == expected.replace('\n\nFusedAdam(1)', '\n\nFusedAdamW(1, weight_decay=0.0)')


def test_an_import_in_a_function_is_changed_there() -> None:
    text = 'def f():\n    from apex import amp\n    return amp.init()\n\n\ndef g(amp):\n    return amp._amp_state\n'
    assert migrated(text) == text.replace('from apex', 'from amp_wrapper')
    assert left(text) == []


def test_torch_is_imported_where_it_is_not() -> None:
    text = 'from apex.parallel import convert_syncbn_model\n\nmodel = convert_syncbn_model(model)\n'
    expected = 'import torch\n\nmodel = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n'
    assert migrated(text) == expected
    hidden = text.replace('\n\nmodel', '\n\ntorch = None\nmodel', 1)
    assert left(hidden) == ['apex.parallel.convert_syncbn_model']
    assert 'torch.nn' not in migrated(hidden)


def test_an_existing_name_is_not_taken() -> None:
    text = 'from apex.optimizers import FusedAdam\nfrom other import FusedAdamW\nFusedAdam(1)\nFusedAdamW(2)\n'
    assert 'from amp_wrapper import FusedAdamW as FusedAdam\n' in migrated(text)


def test_a_fallback_under_the_same_name_keeps_the_name() -> None:
    text = 'try:\n    from apex.optimizers import FusedAdam\n'
    text += 'except ImportError:\n    from torch.optim import AdamW as FusedAdam\n'
    after = migrated(text + 'FusedAdam(p, weight_decay=0.1)\n')
    assert 'from amp_wrapper import FusedAdamW as FusedAdam\n' in after
    assert after.endswith('AdamW as FusedAdam\nFusedAdam(p, weight_decay=0.1)\n')


@pytest.mark.parametrize('test', ['{} is not None', 'not {}', '{} and cuda', '{} if {} else None', 'x == {}', '[{}]'])
def test_asking_whether_the_import_worked(test: str) -> None:
    text = 'try:\n    from apex.optimizers import FusedAdam\nexcept ImportError:\n    FusedAdam = None\n'
    text += 'FusedAdam(p, weight_decay=0.1)\nx = ' + test.replace('{}', 'FusedAdam') + '\n'
    if test in ('x == {}', '[{}]', '{} if {} else None'):
        assert left(text) == ['apex.optimizers.FusedAdam']
        assert 'FusedAdam = None\nFusedAdamW(p, weight_decay=0.1)\n' in migrated(text)
    else:
        expected = text.replace('apex.optimizers', 'amp_wrapper').replace('FusedAdam', 'FusedAdamW')
        assert migrated(text) == expected
        assert left(text) == []


def test_asking_stays_with_the_call_that_stays() -> None:
    text = 'from apex.optimizers import FusedAdam\nif FusedAdam:\n    a = FusedAdam(p), FusedAdam(q, **options)\n'
    assert left(text) == ['apex.optimizers.FusedAdam']
    assert 'if FusedAdam:\n    a = FusedAdamW(p, weight_decay=0.0), FusedAdam(q, **options)\n' in migrated(text)


def test_internals_below_the_new_name_are_listed() -> None:
    text = 'import amp_wrapper.amp\n\nprint(amp_wrapper.amp._amp_state.loss_scalers[0].loss_scale())\n'
    assert migrated(text) == text
    assert left(text) == ['apex.amp._amp_state.loss_scalers']


def test_a_keyword_is_no_name() -> None:
    text = 'import apex\n\nf(apex=apex.amp.init(), other=apex)\n'
    assert migrated(text) == 'import amp_wrapper.amp\n\nf(apex=amp_wrapper.amp.init(), other=amp_wrapper)\n'


def test_import_apex_stays_where_apex_is_still_used() -> None:
    text = 'import apex\napex.amp.init()\napex.optimizers.FusedLAMB(p)\n'
    assert (
        migrated(text) == 'import amp_wrapper.amp\nimport apex\namp_wrapper.amp.init()\napex.optimizers.FusedLAMB(p)\n'
    )
    assert migrated('import apex\napex.amp.init()\n') == 'import amp_wrapper.amp\namp_wrapper.amp.init()\n'
    assert migrated('try:\n    import apex\n    HAVE = True\nexcept ImportError:\n    HAVE = False\n').startswith(
        'try:\n    import amp_wrapper\n    HAVE'
    )


def test_two_statements_on_a_line_and_an_import_alone_in_a_block() -> None:
    assert migrated('from apex import amp; x = 1\n') == 'from amp_wrapper import amp; x = 1\n'
    text = 'import torch\nif sync: import apex.parallel\nm = apex.parallel.convert_syncbn_model(m)\n'
    expected = 'import torch\nif sync: pass\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n'
    assert migrated(text) == expected


def test_layout_and_comments_stay() -> None:
    text = 'from apex.amp import (  # ours\n    initialize,  # casts\n    # scales\n    scale_loss as scale,\n)\n'
    assert migrated(text) == text.replace('apex', 'amp_wrapper')
    text = '# header\n\n# about it\nfrom apex import amp, parallel  # tail\n\nparallel.convert_syncbn_model(m)\nimport torch\n'
    after = migrated(text)
    assert after.startswith('# header\n\n# about it\n') and '  # tail\n' in after


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('before', 'after', 'by_hand'),
    [
        ('DDP(m)', 'DDP(m)', 0),
        ('DDP(m, delay_allreduce=True)', 'DDP(m)', 0),
        ('DDP(module=m, message_size=1, prof=True)', 'DDP(module=m)', 0),
        ('DDP(m, gradient_average=True, allreduce_always_fp32=False)', 'DDP(m)', 0),
        ('DDP(m, gradient_average=flag)', 'DDP(m, gradient_average=flag)', 1),
        ('DDP(m, 1, True, None, None, False, True)', 'DDP(m, allreduce_always_fp32=True)', 1),
        ('DDP(m, device_ids=[0])', 'DDP(m, device_ids=[0])', 1),
    ],
)
def test_arguments_of_distributed_data_parallel(before: str, after: str, by_hand: int) -> None:
    text = f'from apex.parallel import DistributedDataParallel as DDP\n{before}\n'
    assert migrated(text) == f'from torch.nn.parallel import DistributedDataParallel as DDP\n{after}\n'
    assert len(left(text)) == by_hand


@pytest.mark.parametrize(
    ('before', 'after'),
    [
        ('FusedAdam(p)', 'FusedAdamW(p, weight_decay=0.0)'),
        ('FusedAdam(p, weight_decay=w)', 'FusedAdamW(p, weight_decay=w)'),
        ('FusedAdam(p, 1, True, b, e)', 'FusedAdamW(p, 1, betas=b, eps=e, weight_decay=0.0)'),
        ('FusedAdam(p, adam_w_mode=False)', 'FusedAdam(p)'),
        ('FusedAdam(p, adam_w_mode=False, weight_decay=w)', 'FusedAdam(p, weight_decay=w)'),
        ('FusedAdam(\n    p,\n    lr=1,\n)', 'FusedAdamW(\n    p,\n    lr=1,\n    weight_decay=0.0,\n)'),
        ('FusedAdam(\n    p,\n    capturable=True\n)', 'FusedAdamW(\n    p, weight_decay=0.0\n)'),
    ],
)
def test_arguments_of_fused_adam(before: str, after: str) -> None:
    text = f'from apex.optimizers import FusedAdam\n{before}\n'
    name = after.partition('(')[0]
    assert migrated(text) == f'from amp_wrapper import {name}\n{after}\n'
    assert left(text) == []


@pytest.mark.parametrize(
    'call',
    [
        'FusedAdam(p, bias_correction=False)',
        'FusedAdam(p, adam_w_mode=mode)',
        'FusedAdam(p, master_weights=True)',
        'FusedAdam(p, **options)',
        'FusedAdam(*everything)',
        'FusedAdam(p, max_grad_norm=1.0)',
        'partial(FusedAdam, lr=1)',
        'FusedSGD(p, 0.1, wd_after_momentum=True)',
        'FusedLAMB(p)',
    ],
)
def test_an_optimizer_that_cannot_be_told_stays(call: str) -> None:
    name = 'FusedAdam' if 'FusedAdam' in call else call.partition('(')[0]
    text = f'from apex.optimizers import {name}\n{call}\n'
    assert migrated(text) == text
    assert left(text) == [f'apex.optimizers.{name}']


def test_fused_adam_means_the_same() -> None:
    """apex's default is decoupled decay of 0; torch's AdamW, and so ours, would decay by 0.01."""
    assert inspect.signature(amp_wrapper.FusedAdamW).parameters['weight_decay'].default == 1e-2
    assert inspect.signature(amp_wrapper.FusedAdam).parameters['weight_decay'].default == 0
    apex = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for cls in (amp_wrapper.FusedAdam, amp_wrapper.FusedAdamW):
        assert {name: inspect.signature(cls).parameters[name].default for name in apex} == apex
    order = list(inspect.signature(amp_wrapper.FusedSGD).parameters)
    assert order[:6] == ['params', 'lr', 'momentum', 'dampening', 'weight_decay', 'nesterov']


@pytest.mark.parametrize('name', ['FP16_Optimizer', 'network_to_half', 'to_python_float'])
def test_uses_of_fp16_utils_are_listed(name: str) -> None:
    text = f'from apex.fp16_utils import {name}\nx = {name}(y)\n'
    assert migrated(text) == text
    assert left(text) == [f'apex.fp16_utils.{name}']


def test_ddp_before_initialize_is_listed_in_the_same_function_only() -> None:
    text = (
        'from apex import amp\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n'
        'def wrong(m, o):\n    m = DDP(m)\n    return amp.initialize(m, o)\n\n\n'
        'def right(m, o):\n    m, o = amp.initialize(m, o)\n    m = DDP(m)\n\n\ndef elsewhere(m):\n    m = DDP(m)\n'
    )
    assert [note.line for note in migrate(text.encode()).by_hand] == [6]


def test_functions_of_amp_that_came_with_a_star() -> None:
    text = 'from apex.amp import *\nmodel = initialize(model)\nwith scale_loss(loss, optimizer) as scaled:\n    pass\n'
    assert migrated(text).startswith('from amp_wrapper.amp import initialize, scale_loss\nmodel = initialize(model)\n')


@pytest.mark.parametrize('quote', ['"', "'", '"""', "'''"])
def test_strings_within_an_f_string_have_other_quotes(quote: str) -> None:
    # what Python 3.10 reads; newer ones read more
    text = f'from apex import amp\nx = f{quote}{{amp._amp_state.loss_scalers[i].loss_scale():.2f}}{quote}\n'
    new = migrated(text)
    compile(new, '', 'exec', dont_inherit=True)
    inside = new.partition(f'f{quote}')[2].rpartition(quote)[0]
    assert quote not in inside
    assert len({mark for mark in '"\'' if mark in inside}) == 1
    assert 'loss_scaler' in inside


def test_comments_beside_arguments_stay_with_them() -> None:
    text = (
        'from apex.optimizers import FusedAdam\n'
        'o = FusedAdam(\n'
        '    p,  # params\n'
        '    lr=1e-3,  # rate\n'
        '    # above\n'
        '    adam_w_mode=True,  # mode\n'
        '    # end\n'
        ')\n'
    )
    assert migrated(text) == (
        'from amp_wrapper import FusedAdamW\n'
        'o = FusedAdamW(\n'
        '    p,  # params\n'
        '    lr=1e-3,  # rate\n'
        '    # above\n'
        '    # mode\n'
        '    # end\n'
        '    weight_decay=0.0,\n'
        ')\n'
    )
    text = (
        'from apex.parallel import DistributedDataParallel as DDP\n'
        'm = DDP(m, # x\n'
        '  delay_allreduce=True # z\n'
        ' ) # w\n'
        'm = DDP(\n'
        '    message_size=1,  # size\n'
        '    module=m,\n'
        ')\n'
    )
    assert migrated(text) == (
        'from torch.nn.parallel import DistributedDataParallel as DDP\n'
        'm = DDP(m # x\n'
        '  # z\n'
        ' ) # w\n'
        'm = DDP(\n'
        '    # size\n'
        '    module=m,\n'
        ')\n'
    )


def test_layout_inside_a_name_stays() -> None:
    text = 'from apex import amp\n(amp.  # of apex\n initialize)(m)\namp . initialize(m)\n'
    assert migrated(text) == text.replace('from apex', 'from amp_wrapper')


def test_names_that_other_files_import_stay() -> None:
    text = 'from apex.normalization import FusedLayerNorm\nfrom apex.optimizers import FusedAdam\n'
    used = text + 'def make(p):\n    return FusedAdam(p, weight_decay=0)\n'
    new = (
        'from torch.nn import LayerNorm as FusedLayerNorm\n'
        'from amp_wrapper import FusedAdamW as FusedAdam\n'
        'def make(p):\n    return FusedAdam(p, weight_decay=0)\n'
    )
    assert migrate(used.encode(), package=True).after == new
    listed = "__all__ = ['FusedLayerNorm']\n__all__ += ['FusedAdam']\n"
    assert migrated(used + listed) == new + listed
    result = migrate(text.encode(), package=True)
    assert result.after == 'from torch.nn import LayerNorm as FusedLayerNorm\nfrom apex.optimizers import FusedAdam\n'
    assert [(note.line, note.name) for note in result.by_hand] == [(2, 'apex.optimizers.FusedAdam')]


def test_what_has_no_import_here_is_not_imported() -> None:
    text = 'from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model\nDDP(m)\n'
    assert migrated(text) == 'from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(m)\n'
    result = migrate(text.encode(), package=True)
    assert 'from apex.parallel import convert_syncbn_model\n' in result.after
    assert [note.name for note in result.by_hand] == ['apex.parallel.convert_syncbn_model']
    assert 'write convert_syncbn_model = torch.nn.SyncBatchNorm.convert_sync_batchnorm' in result.by_hand[0].text


def test_a_star_in_a_package_stays_and_is_listed() -> None:
    result = migrate(b'from apex.parallel import *\n', package=True)
    assert not result.changed
    assert [note.name for note in result.by_hand] == ['apex.parallel.*']


@pytest.mark.parametrize('before', ['', 'import apex\n'])
def test_a_module_that_is_gone_is_not_imported_for_what_stays(before: str) -> None:
    new = migrated(f'{before}import apex.amp\napex.amp.initialize(m)\napex.optimizers.FusedLAMB(p)\n')
    assert 'import apex.amp' not in new
    assert new.count('import apex\n') == 1
    assert migrated(new) == new


def test_amp_that_was_passed_on_is_followed_as_far_as_its_name_goes() -> None:
    text = 'from apex import amp\nself.amp = amp\nself.amp._amp_state.loss_scalers[0].loss_scale()\n'
    assert left(text) == ['_amp_state']
    assert left(migrated(text)) == ['_amp_state']
    assert left('import apex\n'.join(['', text.partition('\n')[2]]).replace('= amp', '= apex.amp')) == ['_amp_state']


def test_types_in_strings_are_listed() -> None:
    text = 'import apex\ndef f(m: "apex.parallel.Reducer", n: list["apex.A"]) -> \'myapex.B\':\n    apex.amp.initialize(m)\n'
    assert left(text) == ['apex.A', 'apex.parallel.Reducer']


# -- clipping -----------------------------------------------------------------------------------------------------------

BLOCK = """
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
"""
CLIP = '    clip_grad_norm_(model.parameters(), 1.0)\n'
HEAD = 'from apex import amp\nfrom torch.nn.utils import clip_grad_norm_\n'


@pytest.mark.parametrize(
    ('levels', 'becomes'),
    [
        ('', 'master_params'),
        ("opt_level='O2'", 'master_params'),
        ('opt_level=args.level', 'master_params'),
        # the weights are what is stepped
        ("opt_level='O1'", 'parameters'),
    ],
)
def test_clipping_after_a_block(levels: str, becomes: str) -> None:
    start = f'model, optimizer = amp.initialize(model, optimizer, {levels})\n' if levels else ''
    text = migrated(f'{HEAD}{start}def train():{BLOCK}{CLIP}')
    wanted = 'amp.master_params(optimizer)' if becomes == 'master_params' else 'model.parameters()'
    assert f'    clip_grad_norm_({wanted}, 1.0)\n' in text
    assert migrated(text) == text and left(text) == []


@pytest.mark.parametrize(
    'text',
    [
        # for runs without amp too
        f'{HEAD}def train():\n    if args.fp16:{BLOCK.replace("    ", "        ")}    else:\n        loss.backward()\n{CLIP}',
        # still scaled
        f'{HEAD}def train():{BLOCK}    {CLIP}',
        # of which optimizer
        f'{HEAD}def train():{BLOCK.replace("optimizer)", "[first, second])")}{CLIP}',
        f'{HEAD}amp.initialize([model, other], [optimizer, third])\ndef train():{BLOCK}{CLIP}'.replace("'O1'", "'O2'"),
    ],
)
def test_clipping_that_is_listed(text: str) -> None:
    text = text.replace('third])', "third], opt_level='O2')")
    assert 'clip_grad_norm_(model.parameters(), 1.0)' in migrated(text)
    assert left(text) == ['clip_grad_norm_(model.parameters())']
    assert left(migrated(text)) == ['clip_grad_norm_(model.parameters())']


def test_clipping_in_the_branch_without_amp_is_left_alone() -> None:
    block = BLOCK.replace('    ', '        ')
    text = f'{HEAD}def train():\n    if args.fp16:{block}    else:\n        loss.backward()\n    {CLIP}'
    assert left(text) == [] and '(model.parameters(), 1.0)' in migrated(text)


def test_arguments_of_this_package_are_known() -> None:
    assert (
        left('from amp_wrapper import amp\namp.initialize(model, keep_fp32=[], fp32_ops=[], from_16bit=True)\n') == []
    )
