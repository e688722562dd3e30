"""The options that a configuration differs by from its level, and numbers of NumPy among options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_wrapper.errors import AmpConfigError
from amp_wrapper.policy import LEVELS, resolve
from amp_wrapper.policy.resolution import overrides_of


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(dtype='bfloat16'),
        dict(dtype='float32'),
        dict(cast_model_type=False),
        dict(cast_model_type='bfloat16', keep_batchnorm_fp32=False),
        dict(patch_torch_functions=False),
        dict(master_weights='split'),
        dict(master_weights=False, accumulate_in_fp32=True, from_16bit=True),
        dict(loss_scale='dynamic'),
        dict(loss_scale=512),
        dict(loss_scale={'enabled': False}),
        dict(loss_scale={'init_scale': 64.0, 'growth_interval': 7, 'max_scale': None}, min_loss_scale=128.0),
        dict(loss_scale='dynamic', max_loss_scale=256.0),
        dict(
            keep_fp32=['head.*', nn.LayerNorm], fp32_ops=['torch.Tensor.sum', dict(name='torch.mm', output='float32')]
        ),
        dict(enabled=False, num_losses=3, verbosity=2, skip_nonfinite=False, max_consecutive_skips=None),
        dict(cast_model_outputs='float16', restore_buffers_on_skip=False, max_consecutive_skips=7),
    ],
)
def test_overrides_of_a_configuration_make_it_again(level: str, options: Any) -> None:
    try:
        policy = resolve(level, **options)
    except AmpConfigError:
        pytest.skip('the level refuses it')
    found = overrides_of(policy)
    assert resolve(policy.opt_level, **found) == policy
    assert bool(found) == (policy != resolve(policy.opt_level))


def test_numbers_of_numpy_are_those_of_python() -> None:
    words: Any = dict(num_losses=np.int64(2), max_consecutive_skips=np.int32(5), skip_nonfinite=np.bool_(False))
    policy = resolve('O2', **words, loss_scale={'growth_interval': np.int64(7)})
    assert policy == resolve(
        'O2', num_losses=2, max_consecutive_skips=5, skip_nonfinite=False, loss_scale={'growth_interval': 7}
    )
    assert [type(value) for value in (policy.num_losses, policy.skip_nonfinite)] == [int, bool]
    for wrong in (np.bool_(True), np.float64(2.0), torch.tensor(True), np.int64(0)):
        with pytest.raises(AmpConfigError, match='num_losses='):
            resolve('O2', num_losses=wrong)  # type: ignore[arg-type]
