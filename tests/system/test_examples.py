"""The examples train for a few steps, and resume exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import differences

from amp_wrapper import resolve
from examples import dcgan_digits, imagenet, simple

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
TINY_GAN = '--epochs 2 --steps-per-epoch 2 --batch-size 8 --width 4 --noise-dim 4'.split()
TINY_IMAGES = '--synthetic 8 --image-size 32 -b 4 -p 1 -j 0 --epochs 2'.split()


def trained_gan(folder: Path, *words: str) -> dict[str, Any]:
    dcgan_digits.train(dcgan_digits.parse([*TINY_GAN, '--out', str(folder), *words]))
    return torch.load(folder / 'checkpoint.pth', weights_only=True)


def trained_images(folder: Path, *words: str) -> dict[str, Any]:
    imagenet.run(imagenet.parse([*TINY_IMAGES, '--out', str(folder), *words]))
    return torch.load(folder / imagenet.CHECKPOINT, weights_only=True)


TRAINED = {'dcgan_digits': trained_gan, 'imagenet': trained_images}


@pytest.mark.parametrize('level', LEVELS)
def test_simple_learns(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    simple.train(level, 41, torch.device('cpu'))
    losses = [float(loss) for loss in re.findall(r'step +\d+  loss ([\d.]+)', capsys.readouterr().out)]
    assert len(losses) == 3 and losses[2] < losses[0] / 5


# float16 convolutions take long on a CPU
@pytest.mark.parametrize(
    ('name', 'level'), [('dcgan_digits', 'O1'), ('dcgan_digits', 'O2'), ('dcgan_digits', 'O5'), ('imagenet', 'O5')]
)
def test_example_resumes_exactly(name: str, level: str, tmp_path: Path) -> None:
    train = TRAINED[name]
    whole = train(tmp_path / 'whole', '--opt-level', level)
    train(tmp_path / 'part', '--opt-level', level, '--epochs', '1')
    path = next((tmp_path / 'part').glob('*.pth*'))
    assert differences(whole, train(tmp_path / 'part', '--opt-level', level, '--resume', str(path))) == []
    models = [whole[part] for part in ('generator', 'discriminator', 'state_dict') if part in whole]
    assert {value.dtype for model in models for value in model.values()} == {torch.float32, torch.int64}
    assert all((scaler['loss_scale'] > 1) == resolve(level).loss_scale.dynamic for scaler in whole['amp'].values())
