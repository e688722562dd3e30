from apex import amp
import torch
from torch import nn, optim

torch.manual_seed(0)
netD, netG = nn.Linear(4, 1), nn.Linear(3, 4)
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=1e-3)
optimizerG = optim.Adam(netG.parameters(), lr=1e-3)

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level='O1', num_losses=3, verbosity=0)


def main():
    losses = []
    for _ in range(2):
        netD.zero_grad()
        output = netD(torch.randn(5, 4))
        errD_real = criterion(output, torch.ones_like(output))
        with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
        fake = netG(torch.randn(5, 3))
        output = netD(fake.detach())
        errD_fake = criterion(output, torch.zeros_like(output))
        with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
        optimizerD.step()
        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones_like(output))
        with amp.scale_loss(errG, [optimizerG, optimizerD], loss_id=2) as errG_scaled:
            errG_scaled.backward()
        optimizerG.step()
        losses += [errD_real.item(), errG.item()]
    return losses
