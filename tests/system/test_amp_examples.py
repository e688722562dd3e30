"""The examples of the functional interface: every level from the command line, exact resume, two processes, errors."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from command_line import python
from grid import but, long
from PIL import Image

from amp_wrapper import AmpAttachError, AmpCheckpointError, amp
from amp_wrapper.policy import LEVELS, dtype_name, resolve

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / 'examples'
#: Nothing of these is needed, so nothing of them is there: sets them to None, and runs the script in argv.
ALONE = (
    'import runpy, sys; absent = ["mmengine", "mmcv", "torchvision", "PIL", "matplotlib"]; '
    'sys.modules.update(dict.fromkeys([*absent, *(name for name in sys.modules if name.split(".")[0] in absent)])); '
    'sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name="__main__")'
)
TINY_GAN = ['--epochs', '2', '--steps-per-epoch', '2', '--batch-size', '8', '--width', '4', '--noise-dim', '4']
TINY_IMAGES = ['--synthetic', '8', '--image-size', '32', '-b', '4', '-p', '1', '-j', '0']


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f'example_{name}', EXAMPLES / f'{name}.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gan, images, simple = load('dcgan_digits'), load('imagenet'), load('simple')


def command(*words: str | Path, starter: Sequence[str] = ('-c', ALONE)) -> str:
    """Run a script, and give back what it printed."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}
    done = python(*starter, *words, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(pattern, text)]


def differences(a: Any, b: Any, path: str = '') -> list[str]:
    """Where two checkpoints differ in a bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        inside = [found for key in a.keys() & b.keys() for found in differences(a[key], b[key], f'{path}.{key}')]
        return [f'{path}.{key}' for key in a.keys() ^ b.keys()] + inside
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [found for i, pair in enumerate(zip(a, b)) for found in differences(*pair, f'{path}.{i}')]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    return [] if a == b else [path]


def check_options(level: str, text: str) -> None:
    """The level that was asked for is the one that ran."""
    policy = resolve(level)
    cast = None if policy.cast_model_type is None else dtype_name(policy.cast_model_type)
    assert f'amp: {level} (' in text
    assert re.search(rf'cast_model_type +: {cast}$', text, re.MULTILINE), text
    assert re.search(rf'patch_torch_functions +: {policy.patch_torch_functions}$', text, re.MULTILINE), text


# -- every level, from the command line -------------------------------------------------------------------------------


@pytest.mark.parametrize('level', but(['O1', 'O2'], LEVELS, long))
def test_simple(level: str) -> None:
    text = command(EXAMPLES / 'simple.py', level, '--steps', '41')
    check_options(level, text)
    losses = numbers(r'step +\d+  loss ([\d.]+)', text)
    assert len(losses) == 3 and losses[2] < losses[0] / 5
    assert re.search(rf'{level} on cpu: loss 0\.\d+$', text)


@pytest.mark.parametrize('level', but(['O2'], LEVELS, long))
def test_dcgan(level: str, tmp_path: Path) -> None:
    text = command(EXAMPLES / 'dcgan_digits.py', '--opt-level', level, '--out', tmp_path, *TINY_GAN)
    check_options(level, text)
    assert '3 losses' in text
    losses = numbers(r'(?:real|fake|generator) ([\d.]+)  ', text)
    assert len(losses) == 6 and all(0 < loss < 20 for loss in losses)
    scales = re.findall(r'loss scales ([^ ]+), ([^ ]+), ([^ ]+) ', text)
    assert len(scales) == 2
    # the first scale of the dynamic levels, or what is left of it
    assert all((float(value) > 1) == resolve(level).loss_scale.dynamic for value in scales[0])
    distance, real, noise = numbers(r'(?:held-out digits:|digits|noise) ([\d.]+)', text)
    assert 0 < real < noise < 10 and real < distance

    picture = np.asarray(Image.open(tmp_path / 'samples.png'))
    assert picture.shape == (480, 600) and picture.dtype == np.uint8
    # margins are paper, and something was drawn
    assert (picture[0] == 255).all() and picture.std() > 1
    curve = ElementTree.parse(tmp_path / 'losses.svg').getroot()
    lines = curve.findall('{http://www.w3.org/2000/svg}polyline')
    assert [len(line.get('points', '').split()) for line in lines] == [2, 2]

    saved = torch.load(tmp_path / 'checkpoint.pth', weights_only=True)
    assert saved['epoch'] == 2 and len(saved['losses']) == 2
    assert sorted(saved['amp']) == ['loss_scaler0', 'loss_scaler1', 'loss_scaler2']
    kinds = {value.dtype for name in ('generator', 'discriminator') for value in saved[name].values()}
    assert kinds == {torch.float32, torch.int64}


@pytest.mark.parametrize('level', but(['O2'], LEVELS, long))
def test_imagenet(level: str, tmp_path: Path) -> None:
    text = command(EXAMPLES / 'imagenet.py', '--opt-level', level, '--out', tmp_path, *TINY_IMAGES, '--epochs', '1')
    check_options(level, text)
    losses = numbers(r'Epoch: \[0\]\[\d/2\] .* Loss ([\d.]+)', text)
    assert len(losses) == 2 and all(1 < loss < 10 for loss in losses)
    (prec1,) = numbers(r'best Prec@1 ([\d.]+)', text)
    assert 0 <= prec1 <= 100
    saved = torch.load(tmp_path / images.CHECKPOINT, weights_only=True)
    assert saved['epoch'] == 1 and saved['arch'] == 'resnet18' and saved['best_prec1'] == pytest.approx(prec1, abs=1e-3)
    assert sorted(saved['amp']) == ['loss_scaler0']
    assert {value.dtype for value in saved['state_dict'].values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize('script', [simple, gan, images])
def test_help(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, 'argv', ['example', '--help'])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(level in text for level in LEVELS)


def test_options_of_apex_are_there() -> None:
    """The command line of apex's example is understood."""
    words = '--synthetic 8 -a resnet50 -j 2 --epochs 3 --start-epoch 1 -b 8 --lr 0.2 --momentum 0.8 --wd 1e-3 -p 5'
    more = '--prof 3 --deterministic --local_rank 0 --opt-level O2 --keep-batchnorm-fp32 False --loss-scale 128.0'
    args = images.parse([*words.split(), *more.split(), '--channels-last', 'True', '-e'])
    assert (args.arch, args.workers, args.epochs, args.start_epoch, args.batch_size) == ('resnet50', 2, 3, 1, 8)
    assert (args.lr, args.momentum, args.weight_decay, args.print_freq, args.prof) == (0.2, 0.8, 1e-3, 5, 3)
    assert (args.opt_level, args.keep_batchnorm_fp32, args.loss_scale) == ('O2', 'False', '128.0')
    assert args.channels_last and args.evaluate and args.deterministic
    assert images.parse(['--synthetic', '8', '--weight-decay', '0.5', '--learning-rate', '1']).weight_decay == 0.5
    assert not images.parse(['--synthetic', '8', '--channels-last', 'False']).channels_last


# -- exact resume -----------------------------------------------------------------------------------------------------


def trained_gan(folder: Path, *words: str | Path) -> dict[str, Any]:
    gan.train(gan.parse([*TINY_GAN, '--out', str(folder), *map(str, words)]))
    return torch.load(folder / 'checkpoint.pth', weights_only=True)


@pytest.mark.parametrize('level', LEVELS)
def test_dcgan_resumes_to_the_bit(level: str, tmp_path: Path) -> None:
    words = ('--opt-level', level)
    whole = trained_gan(tmp_path / 'whole', *words, '--epochs', '4')
    trained_gan(tmp_path / 'part', *words, '--epochs', '2')
    part = trained_gan(
        tmp_path / 'part', *words, '--epochs', '4', '--resume', tmp_path / 'part' / 'checkpoint.pth', '--seed', '5'
    )
    assert differences(whole, part) == []
    assert whole['epoch'] == 4 and len(whole['losses']) == 4
    # a scale that began anew would have counted the steps since the resume
    counts = [scaler['unskipped'] for scaler in whole['amp'].values()]
    assert not resolve(level).loss_scale.dynamic or max(counts) > 4
    for name in ('samples.png', 'losses.svg'):
        assert (tmp_path / 'whole' / name).read_bytes() == (tmp_path / 'part' / name).read_bytes()


@long
@pytest.mark.timeout(300)
@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_dcgan_resumes_to_the_bit_in_a_new_process(level: str, tmp_path: Path) -> None:
    """With the dynamic scale of O2, which overflows on the way."""

    def train(folder: Path, *words: str | Path) -> dict[str, Any]:
        text = command(EXAMPLES / 'dcgan_digits.py', '--opt-level', level, *TINY_GAN, '--out', folder, *words)
        assert ('resumed from' in text) == ('--resume' in words)
        return torch.load(folder / 'checkpoint.pth', weights_only=True)

    whole = train(tmp_path / 'whole', '--epochs', '4')
    train(tmp_path / 'part', '--epochs', '1')
    part = train(tmp_path / 'part', '--epochs', '4', '--resume', tmp_path / 'part' / 'checkpoint.pth')
    assert differences(whole, part) == []
    scales = [scaler['loss_scale'] for scaler in whole['amp'].values()]
    assert scales == [1.0] * 3 if level == 'O5' else all(1 < scale < 2**17 for scale in scales)


def test_dcgan_resumes_at_another_level(tmp_path: Path) -> None:
    first = trained_gan(tmp_path, '--opt-level', 'O5')
    assert first['epoch'] == 2
    then = trained_gan(tmp_path, '--opt-level', 'O0', '--epochs', '3', '--resume', tmp_path / 'checkpoint.pth')
    assert then['epoch'] == 3 and then['losses'][:2] == first['losses']


def test_dcgan_has_nothing_left_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trained_gan(tmp_path)
    after = trained_gan(tmp_path, '--resume', tmp_path / 'checkpoint.pth')
    assert 'nothing to train: the checkpoint stands at epoch 2' in capsys.readouterr().out
    assert differences(before, after) == []


def trained_images(folder: Path, *words: str | Path) -> dict[str, Any]:
    images.run(images.parse([*TINY_IMAGES, '--out', str(folder), *map(str, words)]))
    return torch.load(folder / images.CHECKPOINT, weights_only=True)


@pytest.mark.parametrize('level', but(['O5'], ['O0', 'O4', 'O5'], long))
def test_imagenet_resumes_to_the_bit(level: str, tmp_path: Path) -> None:
    words = ('--opt-level', level, '--loss-scale', 'dynamic')
    whole = trained_images(tmp_path / 'whole', *words, '--epochs', '2')
    trained_images(tmp_path / 'part', *words, '--epochs', '1')
    path = tmp_path / 'part' / images.CHECKPOINT
    part = trained_images(tmp_path / 'part', *words, '--epochs', '2', '--resume', path)
    assert differences(whole, part) == []
    assert whole['optimizer']['param_groups'][0]['lr'] > 0


# -- several processes ------------------------------------------------------------------------------------------------

#: The example, which says at its end what each process has.
WITNESS = """
import runpy, sys, torch
sys.argv = sys.argv[1:]
script = runpy.run_path(sys.argv[0])
fit = script['Trainer'].fit

def fit_and_tell(self):
    fit(self)
    torch.save(dict(self.bare.named_parameters()), self.args.out / f'rank{self.rank}.pth')

script['Trainer'].fit = fit_and_tell
script['main']()
"""
TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2')


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize('level', ['O4', 'O5'])
def test_imagenet_in_two_processes(level: str, tmp_path: Path) -> None:
    """They share the images, agree on the numbers, and resume to the bit."""

    witness = tmp_path / 'witness.py'
    witness.write_text(WITNESS)

    def train(folder: Path, *words: str | Path) -> tuple[str, dict[str, Any]]:
        text = command(
            witness, EXAMPLES / 'imagenet.py', '--opt-level', level, *TINY_IMAGES, '--synthetic', '20', '--out', folder, *words,
            starter=TORCHRUN,
        )  # fmt: skip
        return text, torch.load(folder / images.CHECKPOINT, weights_only=True)

    text, whole = train(tmp_path / 'whole', '--epochs', '2')
    check_options(level, text)
    left, right = (torch.load(tmp_path / 'whole' / f'rank{rank}.pth') for rank in (0, 1))
    assert len(left) == 62 and differences(left, right) == []
    # one voice, and half of the steps: 20 images for 2 x 4 in a step
    assert re.findall(r'Epoch: (\[\d\]\[\d/\d\])', text) == [f'[{e}][{s}/3]' for e in (0, 1) for s in (1, 2, 3)]
    assert text.count('best Prec@1') == 1 and text.count(' * Prec@1') == 2
    # of the ten validation images each counts once
    assert all(value % 10 == 0 for value in numbers(r' \* Prec@1 ([\d.]+)', text))
    train(tmp_path / 'part', '--epochs', '1')
    resumed, part = train(tmp_path / 'part', '--epochs', '2', '--resume', tmp_path / 'part' / images.CHECKPOINT)
    assert resumed.count('resumed from') == 1
    assert differences(whole, part) == []


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'words, message',
    [
        ('', 'name the folder of the images, or make some: --synthetic N'),
        ('--synthetic 1', '--synthetic 1 must be at least 2'),
        ('DIR --synthetic 8', 'DIR is not read with --synthetic'),
        ('--synthetic 8 --image-size 16', '--image-size 16 must be at least 32'),
        ('--synthetic 8 -b 1', '--batch-size 1 must be at least 2'),
        ('--synthetic 8 --lr nan', '--lr nan must be at least 0, and finite'),
        ('--synthetic 8 -p 0', '--print-freq 0 must be at least 1'),
        ('--synthetic 8 -a alexnot', 'alexnot'),
        ('--synthetic 8 --opt-level o2', "invalid choice: 'o2'"),
        ('--synthetic 8 --keep-batchnorm-fp32 yes', "invalid choice: 'yes'"),
        ('--synthetic 8 --channels-last yes', "'yes' must be True or False"),
        ('--synthetic 8 --sync_bn', "torch's SyncBatchNorm needs GPUs"),
        (
            '--synthetic 8 --pretrained',
            '--pretrained needs torchvision, which is not installed, or does not fit this torch',
        ),
        ('DIR', 'images are read with torchvision, which is not installed'),
    ],
)
def test_imagenet_refuses(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, 'torchvision', None)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit) as caught:
        images.parse(words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_imagenet_wants_both_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, 'torchvision', ModuleType('torchvision'))
    monkeypatch.setattr(images, 'model_names', lambda: ['resnet18'])
    (tmp_path / 'train').mkdir()
    with pytest.raises(SystemExit):
        images.parse([str(tmp_path)])
    assert f'{tmp_path} must hold the folders train and val' in capsys.readouterr().err


@pytest.mark.parametrize(
    'words, message',
    [
        ('--epochs 0', "'0' must be a whole number of at least 1"),
        ('--lr inf', "'inf' must be a finite number of at least 0"),
        ('--lr fast', "'fast' must be a finite number"),
        ('--dropout 1', "'1' must be below 1"),
        ('--batch-size 2000', 'there are 1,437 training images'),
        ('--opt-level O6', "invalid choice: 'O6'"),
        ('--device cuda', 'torch sees no GPU here'),
    ],
)
def test_dcgan_refuses(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit) as caught:
        gan.parse(words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_end_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration, a missing file, a folder that is none: no traceback."""
    (tmp_path / 'file').write_text('')
    both = ['--out', str(tmp_path)]
    for script, words, start in (
        (gan, ['--opt-level', 'O1', '--keep-batchnorm-fp32', 'True', *both], 'AmpConfigError: '),
        (gan, ['--resume', str(tmp_path / 'none.pth'), *both], 'AmpCheckpointError: '),
        (gan, ['--out', str(tmp_path / 'file')], 'CheckpointWriteError: '),
        (images, [*TINY_IMAGES, '--loss-scale', '0', *both], 'AmpConfigError: '),
        (images, [*TINY_IMAGES, '--resume', str(tmp_path), *both], 'AmpCheckpointError: '),
    ):
        monkeypatch.setattr(sys, 'argv', ['example', *words])
        with pytest.raises(SystemExit) as caught:
            script.main()
        # sys.exit with a text prints it, and ends with 1
        assert isinstance(caught.value.code, str) and caught.value.code.startswith(start), caught.value.code


def test_checkpoints_of_others_are_refused(tmp_path: Path) -> None:
    saved = trained_gan(tmp_path)
    path = tmp_path / 'checkpoint.pth'
    with pytest.raises(AmpCheckpointError, match=r'--width 4, not 5: resume with --width 4'):
        trained_gan(tmp_path, '--resume', path, '--width', '5')
    with pytest.raises(AmpCheckpointError, match=r'it has no arch, best_prec1, optimizer, state_dict'):
        trained_images(tmp_path, '--resume', path)
    torch.save({**saved, 'arch': 'resnet50', 'best_prec1': 0.0, 'state_dict': {}, 'optimizer': {}}, path)
    with pytest.raises(AmpCheckpointError, match=r'holds a resnet50, not a resnet18: resume with --arch resnet50'):
        trained_images(tmp_path, '--resume', path)
    torch.save([1, 2], path)
    with pytest.raises(AmpCheckpointError, match='no checkpoint of this script'):
        trained_gan(tmp_path, '--resume', path)


def test_a_model_in_ddp_comes_too_early() -> None:
    """The order of the example is the one that is asked for."""
    source = (EXAMPLES / 'imagenet.py').read_text()
    assert source.index('amp.initialize(') < source.index('DistributedDataParallel(self.bare')
    wrapped = torch.nn.DataParallel(torch.nn.Linear(1, 1))
    with pytest.raises(AmpAttachError, match='is wrapped in DataParallel already'):
        amp.initialize(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))


# -- the parts --------------------------------------------------------------------------------------------------------


def test_the_heart_of_the_simple_one_is_short() -> None:
    source = (EXAMPLES / 'simple.py').read_text()
    heart = source[source.index('    model = ') : source.index('        if step %')]
    assert len(heart.strip().splitlines()) <= 10


def test_frechet_distance() -> None:
    some = torch.randn(200, 1, 8, 8)
    axes = torch.linalg.qr(torch.randn(64, 64)).Q[:, :16]
    assert gan.frechet_distance(some, some, axes) < 1e-9
    # the same shape elsewhere: the square of the way, seen along the axes
    way = torch.randn(1, 1, 8, 8)
    expected = (way.flatten() @ axes).square().sum().item()
    assert gan.frechet_distance(some, some + way, axes) == pytest.approx(expected, rel=1e-4)
    # twice as wide: the trace of the covariance once more
    wide = torch.trace((some.flatten(1) @ axes).T.cov()).item()
    assert gan.frechet_distance(some, 2 * some - some.mean(0), axes) == pytest.approx(wide, rel=1e-4)
    some[0, 0, 0, 0] = float('inf')
    assert np.isnan(gan.frechet_distance(some, some, axes))


def test_png(tmp_path: Path) -> None:
    grey = torch.randint(0, 256, (5, 7), dtype=torch.uint8)
    gan.write_png(grey, tmp_path / 'a.png')
    assert np.array_equal(np.asarray(Image.open(tmp_path / 'a.png')), grey.numpy())


@pytest.mark.parametrize('losses', [[], [[0.1, 0.2, 0.3]], [[float('nan')] * 3, [1.0, 2.0, 3.0]]])
def test_curve_of_few_or_broken_losses(losses: list[list[float]], tmp_path: Path) -> None:
    gan.write_curve(losses, tmp_path / 'a.svg')
    assert 'nan' not in (tmp_path / 'a.svg').read_text()
    ElementTree.parse(tmp_path / 'a.svg')


def test_resnets_have_the_weights_of_the_paper() -> None:
    for name, count in (('resnet18', 11_689_512), ('resnet50', 25_557_032)):
        with torch.device('meta'):
            model = images.ResNet(*images.OWN_MODELS[name], 1000)
        assert sum(parameter.numel() for parameter in model.parameters()) == count
    model = images.ResNet(*images.OWN_MODELS['resnet50'], 7)
    assert model.eval()(torch.randn(2, 3, 64, 32)).shape == (2, 7)


def test_accuracy() -> None:
    output = torch.eye(6)
    top1, top5 = images.accuracy(output, torch.tensor([0, 1, 2, 0, 0, 0]))
    assert top1.item() == 50.0 and 50.0 <= top5.item() <= 100.0
    assert [value.item() for value in images.accuracy(output[:2, :2], torch.tensor([1, 0]))] == [0.0, 100.0]


def test_learning_rate(tmp_path: Path) -> None:
    args = images.parse([*TINY_IMAGES, '--out', str(tmp_path), '--lr', '6.4', '--opt-level', 'O0'])
    trainer = images.Trainer(args, torch.device('cpu'), 0, 1)
    rates = {}
    for epoch, step in ((0, 0), (0, 9), (4, 9), (5, 0), (29, 9), (30, 0), (60, 0), (80, 0)):
        trainer.epoch = epoch
        rates[epoch, step] = trainer.learning_rate(step, 10)
    # 6.4 is for 256 images, and a step has 4
    assert list(rates.values()) == pytest.approx([0.002, 0.02, 0.1, 0.1, 0.1, 0.01, 0.001, 0.0001])


def test_synthetic_images_are_the_same_each_time() -> None:
    a, b = images.Synthetic(30, 32, 1), images.Synthetic(30, 32, 1)
    assert all(torch.equal(a[i][0], b[i][0]) and a[i][1] == b[i][1] == i % 10 for i in (0, 17, 29))
    assert not torch.equal(a[3][0], images.Synthetic(30, 32, 2)[3][0])
    with pytest.raises(IndexError):
        a[30]


@long
def test_imagenet_learns_evaluates_and_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ('--synthetic', '80', '-b', '8', '--warmup-epochs', '0', '--opt-level', 'O4')
    saved = trained_images(tmp_path, *words, '--epochs', '2')
    assert saved['best_prec1'] > 50
    best = torch.load(tmp_path / images.BEST, weights_only=True)
    assert best['best_prec1'] == saved['best_prec1']
    found = images.run(
        images.parse([*TINY_IMAGES, *words, '--out', str(tmp_path), '-e', '--resume', str(tmp_path / images.BEST)])
    )
    assert found == saved['best_prec1']
    capsys.readouterr()
    trained_images(tmp_path, *words, '--epochs', '1', '--prof', '0')
    text = capsys.readouterr().out
    # ten steps and no validation
    assert '[0][10/10]' in text and 'aten::' in text and ' * Prec@1' not in text
    with pytest.raises(SystemExit, match='--prof 1: an epoch has 10 steps'):
        trained_images(tmp_path, *words, '--epochs', '1', '--prof', '1')
