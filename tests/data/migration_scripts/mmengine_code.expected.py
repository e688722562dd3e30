from amp_wrapper import ApexOptimWrapper
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from amp_wrapper import ApexOptimWrapper as Apex
from mmengine.registry import OPTIM_WRAPPERS


def amp(cfg, level, optimizer, **kwargs):
    if cfg.optim_wrapper.type == 'ApexOptimWrapper':
        return
    cfg.optim_wrapper.type = 'amp_wrapper.ApexOptimWrapper'
    cfg.optim_wrapper['type'] = 'amp_wrapper.ApexOptimWrapper'
    cfg.optim_wrapper.update(type='amp_wrapper.ApexOptimWrapper', opt_level='O3')
    cfg.merge_from_dict(dict(type='amp_wrapper.ApexOptimWrapper', opt_level='O3'))
    cfg.optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', loss_scale='dynamic', opt_level=level)
    cfg.optim_wrapper = dict(type='amp_wrapper.ApexOptimWrapper', **kwargs)
    wrapper = ApexOptimWrapper(opt_level='O3', optimizer=optimizer)
    assert isinstance(wrapper, (AmpOptimWrapper, Apex, OptimWrapper))
    return OPTIM_WRAPPERS.build(dict(type=ApexOptimWrapper, optimizer=optimizer))
