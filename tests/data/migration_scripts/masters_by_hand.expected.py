import torch
from apex.fp16_utils import *
from apex.fp16_utils.loss_scaler import DynamicLossScaler
import apex.fp16_utils as utils

model = network_to_half(torch.nn.Linear(4, 2))
model_params, master_params = prep_param_lists(model)
optimizer = torch.optim.SGD(master_params, lr=1e-3)
scaler = DynamicLossScaler()
loss = model(torch.ones(1, 4)).sum()
(loss * scaler.loss_scale).backward()
model_grads_to_master_grads(model_params, master_params)
optimizer.step()
master_params_to_model_params(model_params, master_params)
print(utils.to_python_float(loss))
wrapped = FP16_Optimizer(optimizer, static_loss_scale=128.0)
wrapped.backward(loss)
wrapped.clip_master_grads(1.0)
