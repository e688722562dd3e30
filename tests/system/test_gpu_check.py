"""``make gpu-check``: what it plans, what it says is missing, and what becomes of jobs; all of it without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fsdp import skip_without_fsdp
from grid import grid
from missing import SkipsWhatLacksAPackage, reason_of

from benchmarks import gpu_check, gpu_stages
from benchmarks.gpu_stages import ROOT, STAGES, Job, Step, files_of, steps

TESTS = ROOT / 'tests'


def called(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}
    return subprocess.run(
        [sys.executable, '-m', 'benchmarks.gpu_check', *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_dry_run_tells_every_command_and_what_is_missing() -> None:
    done = called('--dry')
    assert done.returncode == 0, done.stderr
    assert [line[3:] for line in done.stdout.splitlines() if line.startswith('== ')] == list(STAGES)
    assert 'missing: gpu: torch sees no GPU' in done.stdout and 'a dry run (exit code 0)' in done.stdout
    for stage in STAGES:
        for step in steps(stage):
            for job in step.jobs:
                assert gpu_check.shown(job) in done.stdout
    for tool in gpu_stages.SANITIZERS:
        assert f'--tool {tool} ' in done.stdout


def test_without_a_gpu_nothing_is_run() -> None:
    before = sorted(path.name for path in gpu_check.RESULTS.iterdir())
    done = called('--stage', 'ddp', 'end-to-end')
    assert done.returncode == 3 and 'there is no GPU (exit code 3)' in done.stdout
    assert re.findall(r'^== (.+)$', done.stdout, re.M) == ['end-to-end', 'ddp']
    assert sorted(path.name for path in gpu_check.RESULTS.iterdir()) == before
    assert called('--stage', 'everything').returncode == 2


def test_make_knows_the_stages() -> None:
    words = ['make', '-n', 'gpu-check', 'STAGE=sanitizer', 'BUDGET=300', 'DRY=1', f'GPU_PYTHON={sys.executable}']
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '-m benchmarks.gpu_check --stage sanitizer --budget 300 --dry' in done.stdout


def test_every_test_that_takes_a_device_is_in_one_stage() -> None:
    listed = [file for stage in ('ops', 'step', 'engine', 'ddp') for file in files_of(stage)]
    assert len(listed) == len(set(listed))
    pattern = r'\ndef test_[^:]*\bdevice: torch.device'
    ours = [path for path in TESTS.rglob('test_*.py') if not {'downstream', 'foreign_packages'} & set(path.parts)]
    taking = [path for path in ours if re.search(pattern, path.read_text(encoding='utf-8'))]
    assert len(taking) > 20
    assert {path.relative_to(ROOT).as_posix() for path in taking} <= set(listed)
    assert all((ROOT / file).is_file() for file in listed)
    with pytest.raises(KeyError):
        steps('everything')


def test_every_benchmark_is_run_and_keeps_its_page() -> None:
    named = {
        path.stem
        for path in (ROOT / 'benchmarks').glob('*.py')
        if "if __name__ == '__main__'" in path.read_text(encoding='utf-8')
    } - {'gpu_check', 'ddp_rank', 'host_probe', 'numbers_memory'}
    # of a CPU alone so far
    named -= {'fidelity', 'level_numbers'}
    words = {job.command[2].removeprefix('benchmarks.'): job.command for stage in STAGES for step in steps(stage)
             for job in step.jobs if job.command[1] == '-m' and job.command[2].startswith('benchmarks.')}  # fmt: skip
    assert named == set(words) and len(named) > 5
    for name in named - {'one_rank'}:
        assert {'--write', '--report'} & set(words[name]), name


def test_every_stage_ends_before_the_machine_is_taken_back() -> None:
    assert gpu_check.BUDGET < 9 * 60
    for stage in STAGES:
        assert all(need in gpu_stages.REMEDIES for step in steps(stage) for job in step.jobs for need in job.needs)


def test_it_starts_without_this_package_and_without_torch() -> None:
    code = (
        'import sys; sys.modules["torch"] = None; sys.modules["amp_wrapper"] = None; sys.modules["mmengine"] = None\n'
        'from benchmarks.gpu_check import main; sys.exit(main(["--dry", "--stage", "ops"]))'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and 'no torch' in done.stdout, done.stderr


def python(name: str, code: str, *needs: str) -> Job:
    return Job(name, (sys.executable, '-c', code), needs)


def test_what_becomes_of_jobs(tmp_path: Path) -> None:
    """Passed, failed, left out and stopped with all its children, whose words so far are kept."""
    child = 'import time; time.sleep(60)'
    slow = (
        f'import subprocess, sys, time; p = subprocess.Popen([sys.executable, "-c", {child!r}]); '
        'print("half done", p.pid, flush=True); time.sleep(60)'
    )
    plan = [
        Step(
            'first', (python('good', 'print("1 passed")'), python('bad', 'print("why"); raise SystemExit(4)')), 1.0, 2
        ),
        Step('second', (python('lacks', 'print(1)', 'gpu', 'mmengine'), Job('none', ('/no/such/program',), ())), 1.0),
        Step('third', (python('slow', slow), python('late', 'print(1)')), 1.0, 1),
    ]
    told: list[int] = []
    begin = time.monotonic()
    absent = {'gpu': 'torch sees no GPU'}
    outcomes = gpu_check.run_stage(plan, absent, 8.0, tmp_path, lambda found: told.append(len(found)))
    assert time.monotonic() - begin < 20
    found = {outcome.job.name: outcome for outcome in outcomes}
    assert {name: outcome.status for name, outcome in found.items()} == {
        'good': 'passed', 'bad': 'failed', 'lacks': 'skipped', 'none': 'failed', 'slow': 'out of time', 'late': 'out of time',
    }  # fmt: skip
    assert found['good'].detail == '1 passed' and found['bad'].detail == 'why'
    assert found['lacks'].detail == 'torch sees no GPU' and told[-1] == 6
    match = re.fullmatch(r'half done (\d+)', found['slow'].detail)
    assert match is not None
    for _ in range(50):
        if not running(int(match[1])):
            break
        time.sleep(0.1)
    assert not running(int(match[1]))
    status, words = gpu_check.verdict(outcomes)
    assert status == 'failed' and words.startswith('1 passed, 2 failed, 2 out of time, 1 skipped')
    text = gpu_check.page('ops', outcomes, 'A machine.')
    assert '| third | slow | out of time |' in text and '## bad: failed' in text and 'torch sees no GPU' in text


def running(process: int) -> bool:
    try:
        state = Path(f'/proc/{process}/stat').read_text(encoding='utf-8').rpartition(')')[2].split()[0]
    except OSError:
        return False
    return state != 'Z'


def test_the_end_has_a_line_for_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {'ops': python('good', 'pass'), 'step': python('bad', '1 / 0'), 'engine': python('lacks', '', 'mmengine')}
    monkeypatch.setattr(gpu_check, 'missing', lambda: {'mmengine': 'pip install mmengine'})
    monkeypatch.setattr(gpu_check, 'steps', lambda stage, arch='': [Step('only', (jobs[stage],))])
    monkeypatch.setattr(gpu_check, 'RESULTS', tmp_path / 'results')
    gpu_check.RESULTS.mkdir()
    code = gpu_check.main(['--stage', 'engine', 'ops', 'step', '--budget', '60', '--out', str(tmp_path / 'out')])
    lines = capsys.readouterr().out.split('== summary\n')[1].splitlines()
    assert [line.split()[:2] for line in lines] == [['ops', 'passed'], ['step', 'failed'], ['engine', 'skipped']]
    assert 'pip install mmengine' in lines[2] and code == 1
    for stage in jobs:
        name = f'gpu_check_{stage}.md'
        assert (tmp_path / 'results' / name).read_text() == (tmp_path / 'out' / name).read_text()
    assert 'ZeroDivisionError' in (tmp_path / 'results' / 'gpu_check_step.md').read_text()
    assert (tmp_path / 'out' / 'step' / 'bad.log').is_file()
    assert gpu_check.main(['--stage', 'ops', '--budget', '60', '--out', str(tmp_path / 'out')]) == 0


@grid
def test_one_rank_trains() -> None:
    skip_without_fsdp()
    done = subprocess.run(
        [sys.executable, '-m', 'benchmarks.one_rank'], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count('trains') == 4, done.stderr


@pytest.mark.parametrize('variant', ['FP32', 'torch.amp', 'O1', 'O2', 'O4', 'O5'])
def test_whole_steps_without_mmengine(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import step_training, wrapping

    monkeypatch.setattr(wrapping, 'HAS_MMENGINE', False)
    training = step_training.Training('small', lambda: step_training.Transformer(64, 1), (2, 4, 64), 'AdamW')
    loop = step_training.Loop(training, variant, torch.device('cpu'))
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    loop.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters()))
    with pytest.raises(step_training.Unavailable, match='mmengine is not installed'):
        step_training.Loop(training, 'stock AMP', torch.device('cpu'))


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ("E   ModuleNotFoundError: No module named 'mmengine'", 'needs mmengine, which is not installed'),
        ("E   ModuleNotFoundError: No module named 'mmengine.runner'", 'needs mmengine, which is not installed'),
        ('amp_wrapper.AmpOptimWrapper needs mmengine, which is not installed: pip', 'needs mmengine, which is not installed'),
        ("E   ModuleNotFoundError: No module named 'mmcv'", None),
        ("E   ModuleNotFoundError: No module named 'amp_wrapper.nothing'", None),
        ("No module named 'mmengine'\n  during this:\nNo module named 'other'", None),
        ('AssertionError', None),
    ],
)  # fmt: skip
def test_which_package_a_failure_lacked(text: str, reason: str | None) -> None:
    assert reason_of(text, ['mmengine']) == reason


def test_files_and_tests_that_lack_a_package_are_skipped(tmp_path: Path) -> None:
    (tmp_path / 'test_file.py').write_text('import nowhere_at_all\ndef test_a(): pass\n')
    (tmp_path / 'test_inside.py').write_text(
        'def test_a():\n    import nowhere_at_all\ndef test_b(): pass\ndef test_c():\n    import another_nowhere\n'
        'def test_d(): assert False, "No module named \'nowhere_at_all\'"\n'
    )
    (tmp_path / 'conftest.py').write_text(
        f'import sys; sys.path.insert(0, {str(TESTS / "support")!r})\n'
        'from missing import SkipsWhatLacksAPackage\n'
        'def pytest_configure(config): config.pluginmanager.register(SkipsWhatLacksAPackage(["nowhere_at_all"]))\n'
    )
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-rs', '-p', 'no:cacheprovider', str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert '2 failed, 1 passed, 2 skipped' in done.stdout, done.stdout
    assert done.stdout.count('needs nowhere_at_all, which is not installed') == 2
    assert SkipsWhatLacksAPackage.__doc__
