import apex
from apex import amp, parallel
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.transformer.amp import GradScaler  # not used


def build(model, name, options):
    classes = {'adam': FusedAdam, 'lamb': FusedLAMB}
    optimizer = FusedAdam(model.parameters(), **options)
    optimizer = FusedAdam(model.parameters(), adam_w_mode=options.decoupled)
    optimizer = FusedAdam(model.parameters(), bias_correction=False)
    optimizer = FusedSGD(model.parameters(), 0.1, wd_after_momentum=True)
    optimizer = FusedSGD(model.parameters(), 0.1)
    optimizer = parallel.LARC(optimizer)
    model, optimizer = apex.amp.initialize(model, optimizer)
    model = apex.contrib.sparsity.ASP.init_model_for_pruning(model)
    return amp.master_params(optimizer), SoftmaxCrossEntropyLoss, classes
