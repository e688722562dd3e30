import importlib.util

from amp_wrapper import amp
import amp_wrapper.amp
from apex.amp import _amp_state
from amp_wrapper.amp import disable_casts
from apex.amp.lists import functional_overrides

HAVE = importlib.util.find_spec('apex.amp') is not None


def scale(model, optimizer, names):
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    print(amp._amp_state.loss_scalers[names['a']].loss_scale(), _amp_state.loss_scalers[0]._unskipped)
    print(_amp_state.opt_properties.master_weights, amp_wrapper.amp.initialize, amp.handle, optimizer._amp_stash.process_zero_grad)
    with disable_casts():
        handle = amp.enable()
    amp.init(enabled=True, fp16_only=True)
    amp.scale_loss(1, 2, loss_id=0, delay_unscale=True, loss_idx=3)
    return handle, functional_overrides
