from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from mmengine.optim.optimizer import ApexOptimWrapper as Apex
from mmengine.registry import OPTIM_WRAPPERS


def amp(cfg, level, optimizer, **kwargs):
    if cfg.optim_wrapper.type == 'ApexOptimWrapper':
        return
    cfg.optim_wrapper.type = 'ApexOptimWrapper'
    cfg.optim_wrapper['type'] = 'ApexOptimWrapper'
    cfg.optim_wrapper.update(type='ApexOptimWrapper', opt_level='O3')
    cfg.merge_from_dict(dict(type='ApexOptimWrapper', opt_level='O3'))
    cfg.optim_wrapper = dict(type='ApexOptimWrapper', opt_level=level)
    cfg.optim_wrapper = dict(type='ApexOptimWrapper', **kwargs)
    wrapper = ApexOptimWrapper(opt_level='O3', optimizer=optimizer)
    assert isinstance(wrapper, (AmpOptimWrapper, Apex, OptimWrapper))
    return OPTIM_WRAPPERS.build(dict(type=ApexOptimWrapper, optimizer=optimizer))
