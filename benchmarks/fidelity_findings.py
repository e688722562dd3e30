"""What was found out about levels that differ from FP32, by task and level: for ``python -m benchmarks.fidelity``."""

from __future__ import annotations

from collections.abc import Mapping

FINDINGS: Mapping[tuple[str, str], str] = {
    ('text', 'O3'): (
        'O3 has no masters, and updates that are small beside a float16 weight are lost. With `master_weights=True` and '
        'nothing else changed, the difference is gone (-0.00001 ± 0.00001, the same five seeds; largest deviation in the '
        'first steps 0.003 %). A dynamic loss scale in their place changes nothing (0.0012 ± 0.0003), so it is not that '
        'gradients become 0.'
    ),
    ('gan', 'O3'): (
        "The first step of the discriminator makes most of its weights infinite. At O3 torch's `Adam` keeps its moments in "
        'float16. The squares of gradients below 0.0055, times 0.001, are 0 there, and `eps=1e-8` is 0 in float16, too, so the '
        'step divides by 0: in the first layer this is so for 53 of 72 weights, and just these 53 are not finite afterwards '
        '(seed 0). All later steps are skipped, since their gradients are NaN, until `OverflowStreakError` ends the run. With '
        '`eps=1e-4` in the optimizer, the losses of the first 30 steps are finite. `FusedAdamW`, with which ViT and text are '
        'trained, keeps FP32 moments at O3.'
    ),
}
