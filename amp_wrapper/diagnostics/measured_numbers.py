"""The numbers that the monitor measures: their names in logs, and what they mean. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping

#: The numbers of a measured step, in the order of its row.
NUMBERS: tuple[str, ...] = (
    'amp_skip_rate',
    'amp_grad_underflow',
    'amp_grad_tiny',
    'amp_grad_peak',
    'amp_weight_peak',
    'amp_update_lost',
    'amp_update_spacing',
)
#: What each of them is.
MEANINGS: Mapping[str, str] = {
    'amp_skip_rate': 'share of the steps since the last measurement that were skipped',
    'amp_grad_underflow': 'share of gradient elements that are zero in the 16-bit type, whatever made them zero',
    'amp_grad_tiny': 'share of gradient elements that are not zero, but less than four times the smallest positive number of '
    'the 16-bit type',
    'amp_grad_peak': 'largest finite gradient, times the loss scale, in powers of two from the largest number of the 16-bit '
    'type: 0 is the end of the range, -10 a thousandth of it',
    'amp_weight_peak': 'largest finite weight, in powers of two from the largest number of the 16-bit type',
    'amp_update_lost': 'share of updates that 16-bit weights without masters would have lost',
    'amp_update_spacing': 'mean size of an update in units of the spacing of 16-bit numbers at its weight',
}
